// A product, divided among threads.
#pragma once

#include <cstddef>

#include "gemm/parts.h"
#include "gemm/path.h"

namespace bf16kit {

constexpr size_t kMostProducts = 3;

// Computes `count` products of the same x together with `run(threads, …)`, and sets their `id`. The parts are short enough
// to occupy `cores` cores. Returns false if there was no memory.
bool multiply(Product* products, size_t count, const Path& path, RunParts run, void* threads,
              unsigned cores = available_cores());

}  // namespace bf16kit
