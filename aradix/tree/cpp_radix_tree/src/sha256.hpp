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

// The digest of each of some pages with the digest before it as prefix: `before`, and then always the last.
void sha256_chain(const Digest &before, const uint8_t *pages, size_t page_bytes, size_t num_pages, Digest *out,
                  bool portably = false);

}  // namespace aradix
