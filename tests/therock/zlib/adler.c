int sysdeps_adler(const char *bytes, int n) {
  int sum = 1;
  for (int i = 0; i < n; ++i)
    sum += bytes[i];
  return sum;
}
