#include <string>
extern "C" int hipStreamCreate(int n) { return static_cast<int>(std::to_string(n).size()); }
