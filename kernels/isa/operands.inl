// The operands of the tiles of every path.

// A block of the weight: one chain's rows of one panel, or of two.
struct Block {
  const uint16_t* w;    // [length, 2 * kPairs * kLanes], rows kPanel apart
  int64_t next_panel;   // elements from one panel to the next, if a tile spans two
  int length;           // rows of the weight in this block
  bool first;           // whether this is the first block of its columns: the totals start at zero
};

// The memory to prefetch: `stride` bytes of it with every row.
struct Ahead {
  const char* from;
  int stride;
};
