// Products as on a machine with many more cores: there must be parts for all of them, and the bits must be those of one thread.
#pragma once

#include <initializer_list>

#include "checks.h"

namespace bf16kit {

struct Workers {
  int64_t threads;
  size_t parts;  // the number of parts that were requested
};

inline void run_on_workers(void* context, void (*part)(void*, size_t), size_t parts, void* work) {
  auto& workers = *static_cast<Workers*>(context);
  workers.parts = parts;
  run_on_threads(&workers.threads, part, parts, work);
}

inline Case draw_sized(Random& random, int64_t rows, int64_t k, int64_t n, Layout layout) {
  Case c;
  c.rows = rows, c.k = k, c.n = n, c.layout = layout;
  c.x = Exact<float>(c.rows * c.k, 0);
  for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = random.normal();
  c.w.resize(c.k * c.n);
  for (uint16_t& value : c.w) value = narrow(random.normal());
  store_weight(c, 0);
  return c;
}

// Computes the case on `threads` for each number of cores; `enough` says whether the number of parts serves so many.
template <typename Enough>
void check_parts(const Case& c, const std::string& where, int64_t threads, std::initializer_list<unsigned> all_cores, Enough enough) {
  const Path& path = *supported_paths(c.arithmetic)[0];
  const Exact<float> usual = compute(c, path, 0, c.rows);
  for (const unsigned cores : all_cores) {
    Exact<float> y(c.rows * c.n, 0);
    Product product = c.product(y.data());
    Workers workers = {threads, 0};
    multiply(&product, 1, path, run_on_workers, &workers, cores);
    check_same(usual, y, 0, c.n, where, "on " + std::to_string(threads));
    if (!enough(workers.parts, cores)) fail(where, std::to_string(workers.parts) + " parts for " + std::to_string(cores) + " cores");
  }
}

// About a millisecond of work for one core: enough for a hundred cores, but less than 64 of the longest parts.
inline void check_many_threads(Random& random) {
  constexpr unsigned kCores = 96;
  check_parts(draw_sized(random, 12, 1024, 4096, Case().layout), "many threads", kCores, {0, 2, kCores},
              [](size_t parts, unsigned cores) { return cores == kCores ? parts >= kCores : parts <= 64; });
}

// A weight of few panels whose blocks are copied: blocks of rows are tall, but no taller than leaves a part for each core.
inline void check_many_threads_of_few_panels(Random& random) {
  constexpr unsigned kCores = 8;
  const auto enough = [](size_t parts, unsigned cores) { return parts == cores; };
  check_parts(draw_sized(random, kTallBlock, 1024, 2 * kPanel, Layout::kTransposed), "few panels", kCores, {2, kCores}, enough);
  check_parts(draw_sized(random, kTallBlock, 1024, kPanel + 8, Layout::kPanels), "a narrow panel", kCores, {2, kCores}, enough);
}

}  // namespace bf16kit
