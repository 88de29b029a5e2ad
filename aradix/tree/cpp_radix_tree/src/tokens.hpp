// Token ids as they come from callers, packed for a key.
#pragma once

#include <nanobind/nanobind.h>

namespace aradix {

namespace nb = nanobind;

// The ids as int32 bytes: one check, one copy. None for whatever is no list, tuple or flat contiguous buffer of plain
// ints from 0 to 2^31 - 1: aradix.keys reads the rest, and says what is wrong.
nb::object pack_tokens(nb::handle token_ids);

}  // namespace aradix
