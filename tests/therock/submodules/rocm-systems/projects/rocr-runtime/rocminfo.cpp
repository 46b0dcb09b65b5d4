#include <cstdio>
extern "C" int hsa_init();
int main() { std::puts("ROCk module is NOT loaded"); return hsa_init(); }
