// What the tiles of every path are given.

// What a chain multiplies and where its sums go.
struct Block {
  const uint16_t* w;    // [length, 2 * kPairs * kLanes], rows kPanel apart
  int64_t next_panel;   // elements from a panel to the next, where a tile spans two
  int length;           // rows of the weight
  bool first;           // of its column: the sums start here
};

// What is wanted next: `stride` bytes of it are asked for with every row.
struct Ahead {
  const char* from;
  int stride;
};
