// The smallest HIP program that is still a real one: y = a*x + y, then the sum of y. The reduction goes through
// wavefront shuffles and LDS, so that the code object holds what differs between targets (wave32 or wave64, DPP or
// ds_bpermute, LDS layout), and main() compares the result with the same sum computed on the host.

#include <hip/hip_runtime.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#define CHECK(call)                                                                                                    \
  do {                                                                                                                 \
    const hipError_t status = (call);                                                                                  \
    if (status != hipSuccess) {                                                                                        \
      std::fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, #call, hipGetErrorString(status));                   \
      std::exit(1);                                                                                                    \
    }                                                                                                                  \
  } while (0)

constexpr int block_size = 256;
// Partial sums of one block: one for each wavefront. 32 is the narrowest wavefront there is.
constexpr int max_waves = block_size / 32;

__global__ void saxpy(int n, float a, const float* x, float* y) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) {
    y[i] = a * x[i] + y[i];
  }
}

// One partial sum for each block, added up by the host: no atomics, so the result is the same in every run.
__global__ void block_sum(int n, const float* values, float* partial) {
  __shared__ float waves[max_waves];

  float sum = 0.0f;
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) {
    sum += values[i];
  }
  for (int offset = warpSize / 2; offset > 0; offset /= 2) {
    sum += __shfl_down(sum, offset);
  }

  const int lane = threadIdx.x % warpSize;
  const int wave = threadIdx.x / warpSize;
  if (lane == 0) {
    waves[wave] = sum;
  }
  __syncthreads();

  if (threadIdx.x == 0) {
    float total = 0.0f;
    for (int w = 0; w < static_cast<int>(blockDim.x) / warpSize; ++w) {
      total += waves[w];
    }
    partial[blockIdx.x] = total;
  }
}

int main() {
  constexpr int n = 1 << 20;
  constexpr int blocks = 64;
  constexpr float a = 2.0f;

  hipDeviceProp_t properties;
  CHECK(hipGetDeviceProperties(&properties, 0));
  std::printf("device 0: %s, %s, wavefront of %d\n", properties.name, properties.gcnArchName, properties.warpSize);

  std::vector<float> x(n);
  std::vector<float> y(n);
  double expected = 0.0;
  for (int i = 0; i < n; ++i) {
    x[i] = static_cast<float>(i % 7);
    y[i] = static_cast<float>(i % 5);
    expected += a * x[i] + y[i];
  }

  float* device_x = nullptr;
  float* device_y = nullptr;
  float* device_partial = nullptr;
  CHECK(hipMalloc(&device_x, n * sizeof(float)));
  CHECK(hipMalloc(&device_y, n * sizeof(float)));
  CHECK(hipMalloc(&device_partial, blocks * sizeof(float)));
  CHECK(hipMemcpy(device_x, x.data(), n * sizeof(float), hipMemcpyHostToDevice));
  CHECK(hipMemcpy(device_y, y.data(), n * sizeof(float), hipMemcpyHostToDevice));

  saxpy<<<(n + block_size - 1) / block_size, block_size>>>(n, a, device_x, device_y);
  CHECK(hipGetLastError());
  block_sum<<<blocks, block_size>>>(n, device_y, device_partial);
  CHECK(hipGetLastError());

  std::vector<float> partial(blocks);
  CHECK(hipMemcpy(partial.data(), device_partial, blocks * sizeof(float), hipMemcpyDeviceToHost));
  double sum = 0.0;
  for (const float value : partial) {
    sum += value;
  }

  CHECK(hipFree(device_x));
  CHECK(hipFree(device_y));
  CHECK(hipFree(device_partial));

  // Small integers: every partial sum is exact in a float, so nothing but equality is right.
  std::printf("sum %.1f, expected %.1f\n", sum, expected);
  return sum == expected ? 0 : 1;
}
