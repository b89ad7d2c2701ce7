// Whether tiles may be used: the processor has them, the system saves them, and permits them.
#pragma once

#include <cstdint>

namespace bf16kit {
namespace amx {

struct Registers {
  uint32_t a, b, c, d;
};

// The queries to a processor and its operating system, which tests replace.
struct Machine {
  Registers (*cpuid)(uint32_t leaf, uint32_t subleaf);
  uint64_t (*enabled)();  // XCR0: the registers that the system saves
  bool (*permitted)();    // asks the system for tiles, for all threads of the process; false when it refuses
};

// Whether the processor has tiles and all else that the path needs, and the system saves them.
bool tiles_there(const Machine& machine);

const Machine& this_processor();

}  // namespace amx
}  // namespace bf16kit
