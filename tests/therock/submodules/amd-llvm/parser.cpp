#include <string>
#include <vector>
std::string parser_phase(const std::vector<std::string> &words) { return words.empty() ? "parser" : "parser " + words.front(); }
