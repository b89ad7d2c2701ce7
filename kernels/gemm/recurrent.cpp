#include "gemm/recurrent.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <new>
#include <utility>

#include "gemm/parallel.h"

namespace bf16kit {
namespace {

// Rows of x that are multiplied at once: enough to read W seldom, few enough that the results stay in a cache.
constexpr int64_t kRowsAtOnce = 256;
// Rows of a batch that are worth reading R for once more, on another thread.
constexpr int64_t kLeastRows = 4;
// The approximate work of one core in a nanosecond: multiplications, and bytes of weights.
constexpr double kMultipliesPerNs = 30, kBytesPerNs = 40;
// Total work in nanoseconds of a step that is worth waking threads for each time.
constexpr double kLongStep = 2 * kAlone;

// A recurrence in progress.
struct Running {
  const Recurrence& all;
  void (*step)(const Step&) = nullptr;
  int64_t wide = 0;     // the columns of all gates
  int64_t state = 0;    // the elements of a direction's h
  int64_t at_once = 0;  // steps whose x are multiplied at once
  int64_t groups = 0, group_rows = 0;  // the groups of a direction's batch rows
  int64_t chunks = 0;   // the parts that a group's units are divided into; if there are several, one step at a time
  float *products = nullptr, *biases = nullptr, *reset_biases = nullptr, *states = nullptr, *cells = nullptr,
        *scratch = nullptr;
  int64_t first = 0, count = 0;  // the steps whose products are there, and their number

  bool reversed(int64_t direction) const { return direction == 1 || all.reverse; }
  // The index in the sequence of step `i`, and of the earliest step in the sequence whose products are there.
  int64_t time(int64_t direction, int64_t i) const { return reversed(direction) ? all.steps - 1 - i : i; }
  int64_t earliest(int64_t direction) const { return reversed(direction) ? all.steps - first - count : first; }

  // The h of step `i`; the initial one is that of step -1. Without y, the h of two steps are kept.
  float* h(int64_t direction, int64_t i) const {
    if (all.y != nullptr && i >= 0) return all.y + (time(direction, i) * all.directions + direction) * state;
    return states + ((i & 1) * all.directions + direction) * state;
  }
};

// Computes steps [from, to) of part i.
void run_part(const Running& running, int64_t i, int64_t from, int64_t to) {
  const Recurrence& all = running.all;
  const int64_t chunk = i % running.chunks, group = i / running.chunks % running.groups;
  const int64_t direction = i / running.chunks / running.groups;
  const int64_t row = group * running.group_rows, at = row * all.hidden;
  const int64_t blocks = divide_up(all.hidden, kUnits);
  Step step = {};
  step.cell = all.cell, step.blocks = all.blocks, step.hidden = all.hidden, step.r = all.r[direction];
  step.rows = std::min(running.group_rows, all.batch - row);
  step.first_unit = blocks * chunk / running.chunks * kUnits;
  step.last_unit = std::min(all.hidden, blocks * (chunk + 1) / running.chunks * kUnits);
  step.reset_bias = running.reset_biases + direction * all.hidden;
  step.c = running.cells + direction * running.state + at;
  step.scratch = running.scratch + ((direction * running.chunks + chunk) * all.batch + row) * scratch_floats(all.hidden);
  for (int64_t now = from; now < to; ++now) {
    const int64_t place = direction * running.at_once + running.time(direction, now) - running.earliest(direction);
    step.inputs = running.products + (place * all.batch + row) * running.wide;
    step.h = running.h(direction, now - 1) + at;
    step.y = running.h(direction, now) + at;
    running.step(step);
  }
}

// Fills in each direction's biases: Wb + Rb in the order of the weights, and apart from it what a GRU adds inside its reset.
void add_biases(const Running& running) {
  const Recurrence& all = running.all;
  const int count = gates(all.cell);
  for (int64_t i = 0; i < all.directions * running.wide; ++i) {
    const int64_t direction = i / running.wide, gate = i / all.hidden % count, unit = i % all.hidden;
    const float* wb = all.bias == nullptr ? nullptr : all.bias + direction * 2 * running.wide + gate * all.hidden + unit;
    const bool apart = all.cell == Cell::kGru && gate == 2;
    float& sum = running.biases[direction * running.wide + all.blocks[gate] * all.hidden + unit];
    sum = wb == nullptr ? 0 : apart ? *wb : *wb + wb[running.wide];
    if (apart) running.reset_biases[direction * all.hidden + unit] = wb == nullptr ? 0 : wb[running.wide];
  }
}

// Multiplies the x of the steps from `first` on by the W of each direction.
bool multiply_inputs(const Running& running, const Path& path, RunParts run, void* threads, unsigned cores) {
  const Recurrence& all = running.all;
  for (int64_t d = 0; d < all.directions; ++d) {
    Product product = {all.x + running.earliest(d) * all.batch * all.inputs, running.count * all.batch,
                       {all.w[d], all.inputs, running.wide, Layout::kTransposed}, running.biases + d * running.wide,
                       Activation::kNone, all.arithmetic, running.products + d * running.at_once * all.batch * running.wide, 0};
    if (!multiply(&product, 1, path, run, threads, cores)) return false;
  }
  return true;
}

void copy(const float* from, int64_t count, float* to) {
  if (from == nullptr) std::memset(to, 0, sizeof(float) * static_cast<size_t>(count));
  else if (from != to) std::memcpy(to, from, sizeof(float) * static_cast<size_t>(count));
}

}  // namespace

bool recur(const Recurrence& all, const Path& path, RunParts run, void* threads, unsigned cores) {
  // All outputs are empty. Without steps x has no elements, so a batch may have more rows than memory could ever hold.
  if (all.batch == 0 || (all.steps == 0 && all.last_h == nullptr && all.last_c == nullptr)) return true;
  Running now = {all};
  now.step = all.arithmetic == Arithmetic::kFp32 ? path.recur : path.recur_bf16;
  now.wide = gates(all.cell) * all.hidden, now.state = all.batch * all.hidden;
  now.at_once = std::min(all.steps, divide_up(kRowsAtOnce, all.batch));
  const int64_t many = std::max<int64_t>(cores, 1);
  now.group_rows = std::min(all.batch, std::max(kLeastRows, divide_up(all.batch * all.directions, many)));
  now.groups = divide_up(all.batch, now.group_rows);
  // How long one core takes for one step.
  const double values = static_cast<double>(now.wide) * static_cast<double>(all.hidden * all.directions);
  const double whole = std::max(values * static_cast<double>(all.batch) / kMultipliesPerNs, 2 * values / kBytesPerNs);
  now.chunks = whole < kLongStep ? 1 : std::min(divide_up(many, now.groups * all.directions), divide_up(all.hidden, kUnits));

  const int64_t states = all.directions * now.state, row = scratch_floats(all.hidden) * all.batch * now.chunks;
  const int64_t product = all.directions * now.at_once * all.batch * now.wide;
  const int64_t floats = product + all.directions * (now.wide + all.hidden + row) + 3 * states + 2 * kUnits;
  const std::unique_ptr<float[]> memory(new (std::nothrow) float[static_cast<size_t>(floats)]);
  if (memory == nullptr) return false;
  float* next = memory.get();
  const auto take = [&](int64_t count) { return std::exchange(next, next + count); };
  now.products = take(product + kUnits), now.scratch = take(all.directions * row);
  now.biases = take(all.directions * now.wide), now.reset_biases = take(all.directions * all.hidden + kUnits);
  now.states = take(2 * states), now.cells = all.last_c != nullptr ? all.last_c : take(states);
  copy(all.h, states, now.h(0, -1));
  if (all.cell == Cell::kLstm) copy(all.c, states, now.cells);
  add_biases(now);

  for (; now.first < all.steps; now.first += now.count) {
    now.count = std::min(now.at_once, all.steps - now.first);
    if (!multiply_inputs(now, path, run, threads, cores)) return false;
    const int64_t end = now.first + now.count, each = now.chunks > 1 ? 1 : now.count;
    for (int64_t from = now.first; from < end; from += each) {
      do_parts(whole * static_cast<double>(each), run, threads, all.directions * now.groups * now.chunks,
               [&](int64_t i) { run_part(now, i, from, from + each); });
    }
  }
  for (int64_t d = 0; all.last_h != nullptr && d < all.directions; ++d) {
    copy(now.h(d, all.steps - 1), now.state, all.last_h + d * now.state);
  }
  return true;
}

}  // namespace bf16kit
