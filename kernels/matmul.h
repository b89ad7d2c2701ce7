// A product, parted among threads.
#pragma once

#include <cstddef>

#include "path.h"

namespace bf16kit {

// Runs part(context, i) for every i in [0, parts), in any order, on any threads, and returns when all are done.
using RunParts = void (*)(void* threads, void (*part)(void* context, size_t i), size_t parts, void* context);

// Computes `product` (its id is filled in here) with `run(threads, …)`. False when there was no memory.
bool multiply(Product product, const Path& path, RunParts run, void* threads);

}  // namespace bf16kit
