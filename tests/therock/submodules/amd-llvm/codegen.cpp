#include <string>
#include <vector>
std::string codegen_phase(const std::vector<std::string> &words) { return words.empty() ? "codegen" : "codegen " + words.front(); }
