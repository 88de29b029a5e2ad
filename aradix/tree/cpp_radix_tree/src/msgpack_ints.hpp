// Arrays of plain ints as msgpack has them, without a Python object for each.
#pragma once

#include <nanobind/nanobind.h>

namespace aradix {

namespace nb = nanobind;

// Of token ids, int32 and none below 0.
nb::object msgpack_ids(nb::bytes tokens);
// Of hashes, 64 bits in big-endian order.
nb::object msgpack_hashes(nb::bytes hashes);

}  // namespace aradix
