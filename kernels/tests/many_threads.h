// Products as on a machine with many more cores: there must be parts for all of them, and the bits must be those of one thread.
#pragma once

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

// About a millisecond of work for one core: enough for a hundred cores, but less than 64 of the longest parts.
inline void check_many_threads(Random& random) {
  constexpr unsigned kCores = 96;
  Case c;
  c.rows = 12, c.k = 1024, c.n = 4096;
  c.x = Exact<float>(c.rows * c.k, 0);
  for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = random.normal();
  c.w.resize(c.k * c.n);
  for (uint16_t& value : c.w) value = narrow(random.normal());
  store_weight(c, 0);
  const Path& path = *supported_paths(c.arithmetic)[0];
  const Exact<float> usual = compute(c, path, 0, c.rows);
  for (const unsigned cores : {0u, 2u, kCores}) {
    Exact<float> y(c.rows * c.n, 0);
    Product product = c.product(y.data());
    Workers workers = {kCores, 0};
    multiply(&product, 1, path, run_on_workers, &workers, cores);
    check_same(usual, y, 0, c.n, "many threads", "on " + std::to_string(kCores));
    const std::string found = std::to_string(workers.parts) + " parts for " + std::to_string(cores) + " cores";
    if (cores == kCores ? workers.parts < kCores : workers.parts > 64) fail("many threads", found);
  }
}

// A transposed weight of few panels: blocks of rows are no taller than leaves a part for each core.
inline void check_many_threads_of_few_panels(Random& random) {
  constexpr unsigned kCores = 8;
  Case c;
  c.rows = kTallBlock, c.k = 1024, c.n = 2 * kPanel;
  c.layout = Layout::kTransposed;
  c.x = Exact<float>(c.rows * c.k, 0);
  for (int64_t i = 0; i < c.x.size(); ++i) c.x[i] = random.normal();
  c.w.resize(c.k * c.n);
  for (uint16_t& value : c.w) value = narrow(random.normal());
  store_weight(c, 0);
  const Path& path = *supported_paths(c.arithmetic)[0];
  const Exact<float> usual = compute(c, path, 0, c.rows);
  for (const unsigned cores : {2u, kCores}) {
    Exact<float> y(c.rows * c.n, 0);
    Product product = c.product(y.data());
    Workers workers = {kCores, 0};
    multiply(&product, 1, path, run_on_workers, &workers, cores);
    check_same(usual, y, 0, c.n, "few panels", "on " + std::to_string(kCores));
    const std::string found = std::to_string(workers.parts) + " parts for " + std::to_string(cores) + " cores";
    if (workers.parts != cores) fail("few panels", found);
  }
}

}  // namespace bf16kit
