// Work that is divided into parts for the threads of a session.
#pragma once

#include <cstddef>
#include <cstdint>

namespace bf16kit {

// Runs part(context, i) for every i in [0, parts), in any order, on any threads, and returns when all are done.
using RunParts = void (*)(void* threads, void (*part)(void* context, size_t i), size_t parts, void* context);

// Total work in nanoseconds below which one thread is done before another one has woken up.
constexpr double kAlone = 32000;

inline int64_t divide_up(int64_t total, int64_t each) { return (total + each - 1) / each; }

// The number of cores that this process may use; 0 if unknown.
unsigned available_cores();

// Runs all parts, which take one core `whole` nanoseconds together: with `run(threads, …)`, or in this thread if it is not
// worth waking another one. Neighbouring parts are run by the same thread as far as possible: it keeps copies of their operands.
void do_parts(double whole, RunParts run, void* threads, void (*part)(void* context, size_t i), size_t parts, void* context);

}  // namespace bf16kit
