#include <string>
#include <vector>
std::string linker_phase(const std::vector<std::string> &words) { return words.empty() ? "linker" : "linker " + words.front(); }
