#include <vector>
extern "C" int hsa_pool(int n) { std::vector<int> pool(n, 1); int sum = 0; for (int each : pool) sum += each; return sum; }
