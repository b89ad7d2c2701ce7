// A product, parted among threads.
#pragma once

#include <cstddef>

#include "gemm/path.h"

namespace bf16kit {

// Runs part(context, i) for every i in [0, parts), in any order, on any threads, and returns when all are done.
using RunParts = void (*)(void* threads, void (*part)(void* context, size_t i), size_t parts, void* context);

constexpr size_t kMostProducts = 3;

// Computes `count` products of the same x at once (their id is filled in here) with `run(threads, …)`. False when there
// was no memory.
bool multiply(Product* products, size_t count, const Path& path, RunParts run, void* threads);

}  // namespace bf16kit
