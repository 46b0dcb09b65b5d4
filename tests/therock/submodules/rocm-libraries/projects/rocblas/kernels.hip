#include <hip/hip_runtime.h>

__global__ void rocblas_kernel(int n, float a, const float *x, float *y) {
  for (int i = 0; i < n; ++i)
    y[i] = a * x[i] + y[i];
}

extern "C" const char *rocblas_targets() { return "rocblas for: " HIP_OFFLOAD_ARCHS; }
