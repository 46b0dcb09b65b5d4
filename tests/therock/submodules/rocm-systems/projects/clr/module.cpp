#include <map>
extern "C" int hipModuleLoad(int n) { static std::map<int, int> modules; return modules[n]++; }
