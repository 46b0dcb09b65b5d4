// Uses each library that is installed. Without arguments, what needs no GPU; with `gpu`, a small computation by each, compared
// with the host's result.
#include <hip/hip_runtime.h>

#include <cmath>
#include <complex>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

static void check(bool good, const char* what) {
  std::printf("%s: %s\n", what, good ? "ok" : "WRONG");
  if (!good) std::exit(1);
}

static void hip(hipError_t status) {
  if (status == hipSuccess) return;
  std::printf("HIP: %s\n", hipGetErrorString(status));
  std::exit(1);
}

// An array in the GPU's memory.
template <typename T>
struct Device {
  T* data;
  size_t count;
  explicit Device(const std::vector<T>& from) : count(from.size()) {
    hip(hipMalloc(reinterpret_cast<void**>(&data), count * sizeof(T)));
    hip(hipMemcpy(data, from.data(), count * sizeof(T), hipMemcpyHostToDevice));
  }
  Device(const Device&) = delete;
  ~Device() { (void)hipFree(data); }
  std::vector<T> host() const {
    std::vector<T> to(count);
    hip(hipMemcpy(to.data(), data, count * sizeof(T), hipMemcpyDeviceToHost));
    return to;
  }
};

static std::vector<float> numbers(size_t count) {
  std::vector<float> values(count);
  for (size_t i = 0; i < count; ++i) values[i] = float((i * 7919) % 257);
  return values;
}

static bool near(float one, float other) { return std::fabs(one - other) <= 1e-3f * (1 + std::fabs(other)); }

#if __has_include(<rocprim/rocprim.hpp>)
#include <rocprim/rocprim.hpp>
static void rocprim_sum() {
  const auto values = numbers(1000);
  float sum = 0;
  for (float value : values) sum += value;
  Device<float> in(values), out(std::vector<float>(1));
  size_t size = 0;
  hip(rocprim::reduce(nullptr, size, in.data, out.data, values.size(), rocprim::plus<float>()));
  Device<char> scratch{std::vector<char>(size)};
  hip(rocprim::reduce(scratch.data, size, in.data, out.data, values.size(), rocprim::plus<float>()));
  check(near(out.host()[0], sum), "rocPRIM, sum");
}
#endif

#if __has_include(<hipcub/hipcub.hpp>)
#include <hipcub/hipcub.hpp>
static void hipcub_max() {
  Device<float> in(numbers(1000)), out(std::vector<float>(1));
  size_t size = 0;
  hip(hipcub::DeviceReduce::Max(nullptr, size, in.data, out.data, int(in.count)));
  Device<char> scratch{std::vector<char>(size)};
  hip(hipcub::DeviceReduce::Max(scratch.data, size, in.data, out.data, int(in.count)));
  check(out.host()[0] == 256, "hipCUB, maximum");
}
#endif

#if __has_include(<thrust/sort.h>)
#include <thrust/device_vector.h>
#include <thrust/execution_policy.h>
#include <thrust/host_vector.h>
#include <thrust/sort.h>
static bool sorted(const std::vector<float>& values) {
  for (size_t i = 1; i < values.size(); ++i)
    if (values[i - 1] > values[i]) return false;
  return true;
}
static void thrust_sort(bool gpu) {
  auto values = numbers(1000);
  check(!sorted(values), "rocThrust, something to sort");
  if (gpu) {
    thrust::device_vector<float> device(values.begin(), values.end());
    thrust::sort(device.begin(), device.end());
    thrust::copy(device.begin(), device.end(), values.begin());
  } else {
    thrust::sort(thrust::host, values.begin(), values.end());
  }
  check(sorted(values), "rocThrust, sort");
}
#endif

#if __has_include(<rocrand/rocrand.h>)
#include <rocrand/rocrand.h>
static void rocrand_mean(bool gpu) {
  int version = 0;
  check(rocrand_get_version(&version) == ROCRAND_STATUS_SUCCESS && version == ROCRAND_VERSION, "rocRAND, version");
  if (!gpu) return;
  rocrand_generator generator;
  Device<float> out(std::vector<float>(100000));
  check(rocrand_create_generator(&generator, ROCRAND_RNG_PSEUDO_PHILOX4_32_10) == ROCRAND_STATUS_SUCCESS, "rocRAND, generator");
  check(rocrand_generate_uniform(generator, out.data, out.count) == ROCRAND_STATUS_SUCCESS, "rocRAND, uniform");
  const auto values = out.host();
  double mean = 0;
  for (float value : values) mean += value / double(values.size());
  check(std::fabs(mean - 0.5) < 0.01, "rocRAND, mean");
  check(rocrand_destroy_generator(generator) == ROCRAND_STATUS_SUCCESS, "rocRAND, end");
}
#endif

#if __has_include(<hiprand/hiprand.h>)
#include <hiprand/hiprand.h>
#endif

#if __has_include(<rocfft/rocfft.h>)
#include <rocfft/rocfft.h>
static void rocfft_impulse(bool gpu) {
  char version[256];
  check(rocfft_get_version_string(version, sizeof version) == rocfft_status_success, "rocFFT, version");
  if (!gpu) return;
  std::vector<std::complex<float>> impulse(64);
  impulse[0] = 1;
  Device<std::complex<float>> data(impulse);
  void* buffer = data.data;
  const size_t length = data.count;
  rocfft_plan plan;
  rocfft_setup();
  check(rocfft_plan_create(&plan, rocfft_placement_inplace, rocfft_transform_type_complex_forward, rocfft_precision_single, 1,
                           &length, 1, nullptr) == rocfft_status_success, "rocFFT, plan");
  check(rocfft_execute(plan, &buffer, nullptr, nullptr) == rocfft_status_success, "rocFFT, execute");
  for (auto value : data.host()) check(std::abs(value - 1.0f) < 1e-5f, "rocFFT, impulse");
  rocfft_plan_destroy(plan);
  rocfft_cleanup();
}
#endif

#if __has_include(<hipfft/hipfft.h>)
#include <hipfft/hipfft.h>
#endif

#if __has_include(<rocblas/rocblas.h>)
#include <rocblas/rocblas.h>
static void rocblas_gemm(bool gpu) {
  size_t size = 0;
  check(rocblas_get_version_string_size(&size) == rocblas_status_success && size > 1, "rocBLAS, version");
  if (!gpu) return;
  const int n = 32;
  const auto a = numbers(n * n), b = numbers(n * n);
  Device<float> da(a), db(b), dc(std::vector<float>(n * n));
  const float one = 1, zero = 0;
  rocblas_handle handle;
  check(rocblas_create_handle(&handle) == rocblas_status_success, "rocBLAS, handle");
  check(rocblas_sgemm(handle, rocblas_operation_none, rocblas_operation_none, n, n, n, &one, da.data, n, db.data, n, &zero,
                      dc.data, n) == rocblas_status_success, "rocBLAS, sgemm");
  float corner = 0;
  for (int k = 0; k < n; ++k) corner += a[size_t(k) * n] * b[size_t(k)];
  check(near(dc.host()[0], corner), "rocBLAS, product");
  rocblas_destroy_handle(handle);
}
#endif

#if __has_include(<hipblas/hipblas.h>)
#include <hipblas/hipblas.h>
#endif

#if __has_include(<rocsparse/rocsparse.h>)
#include <rocsparse/rocsparse.h>
static void rocsparse_axpy(bool gpu) {
  rocsparse_mat_descr description;
  check(rocsparse_create_mat_descr(&description) == rocsparse_status_success, "rocSPARSE, description");
  check(rocsparse_destroy_mat_descr(description) == rocsparse_status_success, "rocSPARSE, its end");
  if (!gpu) return;
  Device<float> x({1, 2}), y({10, 20, 30});
  Device<rocsparse_int> at({0, 2});
  const float two = 2;
  rocsparse_handle handle;
  check(rocsparse_create_handle(&handle) == rocsparse_status_success, "rocSPARSE, handle");
  check(rocsparse_saxpyi(handle, 2, &two, x.data, at.data, y.data, rocsparse_index_base_zero) == rocsparse_status_success,
        "rocSPARSE, saxpyi");
  check(y.host() == std::vector<float>({12, 20, 34}), "rocSPARSE, sum");
  rocsparse_destroy_handle(handle);
}
#endif

#if __has_include(<hipsparse/hipsparse.h>)
#include <hipsparse/hipsparse.h>
#endif

#if __has_include(<rocsolver/rocsolver.h>)
#include <rocsolver/rocsolver.h>
static void rocsolver_lu(bool gpu) {
  size_t size = 0;
  check(rocsolver_get_version_string_size(&size) == rocblas_status_success && size > 1, "rocSOLVER, version");
  if (!gpu) return;
  Device<float> a({4, 2, 2, 3});
  Device<rocblas_int> pivots(std::vector<rocblas_int>(2)), info(std::vector<rocblas_int>(1));
  rocblas_handle handle;
  check(rocblas_create_handle(&handle) == rocblas_status_success, "rocSOLVER, handle");
  check(rocsolver_sgetrf(handle, 2, 2, a.data, 2, pivots.data, info.data) == rocblas_status_success, "rocSOLVER, sgetrf");
  check(near(a.host()[3], 2) && info.host()[0] == 0, "rocSOLVER, LU");
  rocblas_destroy_handle(handle);
}
#endif

#if __has_include(<hipsolver/hipsolver.h>)
#include <hipsolver/hipsolver.h>
#endif

int main(int count, char** words) {
  const bool gpu = count == 2 && !std::strcmp(words[1], "gpu");
#if __has_include(<rocprim/rocprim.hpp>)
  if (gpu) rocprim_sum();
#endif
#if __has_include(<hipcub/hipcub.hpp>)
  if (gpu) hipcub_max();
#endif
#if __has_include(<thrust/sort.h>)
  thrust_sort(gpu);
#endif
#if __has_include(<rocrand/rocrand.h>)
  rocrand_mean(gpu);
#endif
#if __has_include(<hiprand/hiprand.h>)
  int hiprand = 0;
  check(hiprandGetVersion(&hiprand) == HIPRAND_STATUS_SUCCESS && hiprand > 0, "hipRAND, version");
#endif
#if __has_include(<rocfft/rocfft.h>)
  rocfft_impulse(gpu);
#endif
#if __has_include(<hipfft/hipfft.h>)
  int hipfft = 0;
  check(hipfftGetVersion(&hipfft) == HIPFFT_SUCCESS && hipfft > 0, "hipFFT, version");
#endif
#if __has_include(<rocblas/rocblas.h>)
  rocblas_gemm(gpu);
#endif
#if __has_include(<hipblas/hipblas.h>)
  check(hipblasStatusToString(HIPBLAS_STATUS_SUCCESS) != nullptr, "hipBLAS, status");
#endif
#if __has_include(<rocsparse/rocsparse.h>)
  rocsparse_axpy(gpu);
#endif
#if __has_include(<hipsparse/hipsparse.h>)
  hipsparseMatDescr_t sparse;
  check(hipsparseCreateMatDescr(&sparse) == HIPSPARSE_STATUS_SUCCESS, "hipSPARSE, description");
  check(hipsparseDestroyMatDescr(sparse) == HIPSPARSE_STATUS_SUCCESS, "hipSPARSE, its end");
#endif
#if __has_include(<rocsolver/rocsolver.h>)
  rocsolver_lu(gpu);
#endif
#if __has_include(<hipsolver/hipsolver.h>)
  hipsolverGesvdjInfo_t info = nullptr;
  check(hipsolverCreateGesvdjInfo(&info) == HIPSOLVER_STATUS_SUCCESS && info, "hipSOLVER, parameters");
  check(hipsolverDestroyGesvdjInfo(info) == HIPSOLVER_STATUS_SUCCESS, "hipSOLVER, their end");
#endif
}
