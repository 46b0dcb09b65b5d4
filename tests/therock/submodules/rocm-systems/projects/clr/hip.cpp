extern "C" int hsa_init();
extern "C" int hipInit(unsigned) { return hsa_init(); }
