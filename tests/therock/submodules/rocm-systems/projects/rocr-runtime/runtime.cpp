extern "C" int sysdeps_adler(const char *, int);
extern "C" int hsa_init() { return sysdeps_adler("hsa", 3) == 0; }
