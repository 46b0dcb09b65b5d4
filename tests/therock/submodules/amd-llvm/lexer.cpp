#include <string>
#include <vector>
std::string lexer_phase(const std::vector<std::string> &words) { return words.empty() ? "lexer" : "lexer " + words.front(); }
