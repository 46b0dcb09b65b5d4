extern "C" const char *torch_targets() { return "torch for: " HIP_OFFLOAD_ARCHS; }
