// Compares the kernel's products with float64 in random cases, on every path that the processor supports.
//
//   property_test [--cases 10000] [--seed 1] [--only INDEX]
//
// Exits with status 1 if a case failed, and prints for each failure how to run that case alone.
#include <cstdio>
#include <cstring>

#include "many_threads.h"
#include "particulars.h"

namespace bf16kit {
namespace {

int run(int64_t cases, int64_t only) {
  std::string names;
  for (const Path* path : supported_paths(Arithmetic::kBf16)) names += std::string(" ") + path->name;
  if (only < 0) {
    Random random(g_seed, 0);
    check_many_threads(random);
    check_many_threads_of_few_panels(random);
    check_particulars();
  }
  return run_cases(cases, only, "", ", paths" + names, [](int64_t i) {
    Random random(g_seed, i);
    const Case c = draw(random);
    check(c, random, "--only " + std::to_string(i), 0.7);
  });
}

}  // namespace
}  // namespace bf16kit

int main(int count, char** arguments) { return bf16kit::run_as_told(count, arguments, bf16kit::run); }
