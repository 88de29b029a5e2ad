// SHA-256 (FIPS 180-4), for the chained hashes of pages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace aradix {

using Digest = std::array<uint8_t, 32>;

// The digest of `prefix` followed by `data`, by the processor's own instructions where it has them and unless told not
// to.
Digest sha256(const uint8_t *prefix, size_t prefix_size, const uint8_t *data, size_t size, bool portably = false);

}  // namespace aradix
