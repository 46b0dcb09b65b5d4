int openblas_ranks(void) { return 3; }
