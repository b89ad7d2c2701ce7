// Work that is divided into parts for the threads of a session.
#pragma once

#include <algorithm>
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

// The same for parts that are a function of their index, part(i).
template <typename Part>
void do_parts(double whole, RunParts run, void* threads, int64_t parts, const Part& part) {
  const auto call = [](void* context, size_t i) { (*static_cast<const Part*>(context))(static_cast<int64_t>(i)); };
  do_parts(whole, run, threads, call, static_cast<size_t>(parts), const_cast<Part*>(&part));
}

// The same for rows that each take one core `row` nanoseconds: rows_of(first, count) for parts that are worth a call.
template <typename RowsOf>
void do_rows(int64_t rows, double row, RunParts run, void* threads, const RowsOf& rows_of) {
  constexpr double kShortest = 16000;  // nanoseconds
  const int64_t each = static_cast<int64_t>(kShortest / row) + 1;
  do_parts(row * static_cast<double>(rows), run, threads, divide_up(rows, each),
           [&](int64_t i) { rows_of(i * each, std::min(each, rows - i * each)); });
}

}  // namespace bf16kit
