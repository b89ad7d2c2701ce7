// A product, parted among threads.
#pragma once

#include <cstddef>

#include "gemm/parts.h"
#include "gemm/path.h"

namespace bf16kit {

constexpr size_t kMostProducts = 3;

// Cores that this process may use; 0 where that is not known.
unsigned available_cores();

// Computes `count` products of the same x at once (their id is filled in here) with `run(threads, …)`, in parts
// that are short enough for `cores` to share. False when there was no memory.
bool multiply(Product* products, size_t count, const Path& path, RunParts run, void* threads,
              unsigned cores = available_cores());

}  // namespace bf16kit
