// A compiler driver that knows one thing of GPUs: which ones the code is for. `-x hip` is C++ in which HIP_OFFLOAD_ARCHS names
// the targets of `--offload-arch`; with --cuda-device-only the output is a code object that has the target's name in it.
#include <cstdio>
#include <fstream>
#include <string>
#include <unistd.h>
#include <vector>

std::string lexer_phase(const std::vector<std::string> &), parser_phase(const std::vector<std::string> &),
    codegen_phase(const std::vector<std::string> &), linker_phase(const std::vector<std::string> &);

int main(int count, char **arguments) {
  const std::string arch_flag = "--offload-arch=";
  std::vector<std::string> words{"g++"};
  std::string archs, output;
  bool hip = false, device_only = false;
  for (int i = 1; i < count; ++i) {
    const std::string word = arguments[i];
    if (word == "--help") {
      std::puts("OVERVIEW: clang LLVM compiler");
      return 0;
    }
    if (word.rfind(arch_flag, 0) == 0) {
      archs += (archs.empty() ? "" : " ") + word.substr(arch_flag.size());
    } else if (word == "--cuda-device-only") {
      device_only = true;
    } else if (word.find("color-diagnostics") != std::string::npos) {
      // ccache says this to whatever is called clang.
    } else if (word == "-x" && i + 1 < count && std::string(arguments[i + 1]) == "hip") {
      hip = true;
      ++i;
    } else {
      if (word == "-o" && i + 1 < count)
        output = arguments[i + 1];
      words.push_back(word);
    }
  }
  if (device_only) {
    std::ofstream(output) << "code object for amdgcn-amd-amdhsa--" << archs << "\n";
    return 0;
  }
  if (hip) {
    words.insert(words.begin() + 1, {"-x", "c++", "-DHIP_OFFLOAD_ARCHS=\"" + archs + "\""});
  }
  std::vector<char *> pointers;
  for (std::string &word : words)
    pointers.push_back(word.data());
  pointers.push_back(nullptr);
  execvp("g++", pointers.data());
  std::perror((lexer_phase({}) + parser_phase({}) + codegen_phase({}) + linker_phase({}) + ": g++").c_str());
  return 1;
}
