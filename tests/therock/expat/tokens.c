int sysdeps_tokens(const char *text) {
  int count = 0;
  while (*text)
    count += *text++ == '<';
  return count;
}
