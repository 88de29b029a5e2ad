#include "sha256.hpp"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__)
#include <cpuid.h>
#include <immintrin.h>
#define ARADIX_SHA_INSTRUCTIONS
#endif

namespace aradix {
namespace {

constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

using State = std::array<uint32_t, 8>;
constexpr State kStart = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
constexpr size_t kBlock = 64;

// Adds whole blocks to a state.
using Compress = void (*)(State &state, const uint8_t *blocks, size_t num_blocks);
// Writes the digest of each of some messages. All have the same blocks but for their pages, which are copied to where
// they belong in `blocks`, behind the digest before.
struct Chain {
    const uint8_t *pages;
    size_t page_bytes, num_pages;
    uint8_t *blocks;
    size_t num_blocks;
};
using CompressChain = void (*)(const Digest &before, const Chain &chain, Digest *out);

void write_digest(const State &state, uint8_t *out) {
    for (uint32_t word : state) {
        word = __builtin_bswap32(word);
        std::memcpy(out, &word, sizeof word);
        out += sizeof word;
    }
}

// The end of a message of so many bytes, of which the last block or two have `filled`; gives what they have then.
size_t pad(uint8_t *blocks, size_t filled, uint64_t num_bytes) {
    size_t end = (filled + 1 + sizeof num_bytes + kBlock - 1) / kBlock * kBlock;
    uint64_t num_bits = __builtin_bswap64(num_bytes * 8);
    blocks[filled++] = 0x80;
    std::memset(blocks + filled, 0, end - filled);
    std::memcpy(blocks + end - sizeof num_bits, &num_bits, sizeof num_bits);
    return end;
}

void compress_one(State &state, const uint8_t *block) {
    std::array<uint32_t, 64> words;
    for (size_t index = 0; index < 16; ++index) {
        const uint8_t *at = block + 4 * index;
        words[index] = static_cast<uint32_t>(at[0]) << 24 | static_cast<uint32_t>(at[1]) << 16 |
                       static_cast<uint32_t>(at[2]) << 8 | static_cast<uint32_t>(at[3]);
    }
    for (size_t index = 16; index < 64; ++index) {
        uint32_t early = words[index - 15], late = words[index - 2];
        words[index] = words[index - 16] + (std::rotr(early, 7) ^ std::rotr(early, 18) ^ (early >> 3)) +
                       words[index - 7] + (std::rotr(late, 17) ^ std::rotr(late, 19) ^ (late >> 10));
    }
    auto [a, b, c, d, e, f, g, h] = state;
    for (size_t index = 0; index < 64; ++index) {
        uint32_t first = h + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & f) ^ (~e & g)) +
                         kRound[index] + words[index];
        uint32_t second = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) + ((a & b) ^ (a & c) ^ (b & c));
        h = g;
        g = f;
        f = e;
        e = d + first;
        d = c;
        c = b;
        b = a;
        a = first + second;
    }
    State added = {a, b, c, d, e, f, g, h};
    for (size_t index = 0; index < 8; ++index)
        state[index] += added[index];
}

void compress_portably(State &state, const uint8_t *blocks, size_t num_blocks) {
    for (size_t index = 0; index < num_blocks; ++index)
        compress_one(state, blocks + index * kBlock);
}

void compress_chain_portably(const Digest &before, const Chain &chain, Digest *out) {
    const Digest *previous = &before;
    for (size_t index = 0; index < chain.num_pages; ++index) {
        std::memcpy(chain.blocks, previous->data(), previous->size());
        std::memcpy(chain.blocks + previous->size(), chain.pages + index * chain.page_bytes, chain.page_bytes);
        State state = kStart;
        compress_portably(state, chain.blocks, chain.num_blocks);
        write_digest(state, out[index].data());
        previous = &out[index];
    }
}

#ifdef ARADIX_SHA_INSTRUCTIONS

#define WITH_INSTRUCTIONS __attribute__((target("sha,sse4.1")))

// A state in the order in which the instructions want it.
struct Lanes {
    __m128i abef, cdgh;
};

WITH_INSTRUCTIONS inline __m128i load(const void *from) {
    return _mm_loadu_si128(static_cast<const __m128i *>(from));
}

WITH_INSTRUCTIONS inline __m128i swapped(__m128i words) {
    return _mm_shuffle_epi8(words, _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203));
}

WITH_INSTRUCTIONS inline Lanes lanes_of(const State &state) {
    __m128i low = _mm_shuffle_epi32(load(state.data()), 0xb1), high = _mm_shuffle_epi32(load(state.data() + 4), 0x1b);
    return Lanes{_mm_alignr_epi8(low, high, 8), _mm_blend_epi16(high, low, 0xf0)};
}

WITH_INSTRUCTIONS inline void words_of(const Lanes &lanes, __m128i &low, __m128i &high) {
    __m128i abef = _mm_shuffle_epi32(lanes.abef, 0x1b), cdgh = _mm_shuffle_epi32(lanes.cdgh, 0xb1);
    low = _mm_blend_epi16(abef, cdgh, 0xf0);
    high = _mm_alignr_epi8(cdgh, abef, 8);
}

// Adds a block of 16 words, four to a vector.
WITH_INSTRUCTIONS inline void add_block(Lanes &lanes, __m128i first, __m128i second, __m128i third, __m128i fourth) {
    const Lanes before = lanes;
    __m128i words[4] = {first, second, third, fourth};
#pragma GCC unroll 16
    for (size_t four = 0; four < 16; ++four) {
        __m128i &now = words[four % 4];
        if (four >= 4) {
            __m128i last = words[(four + 3) % 4];
            __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(now, words[(four + 1) % 4]),
                                        _mm_alignr_epi8(last, words[(four + 2) % 4], 4));
            now = _mm_sha256msg2_epu32(sum, last);
        }
        __m128i input = _mm_add_epi32(now, load(kRound.data() + 4 * four));
        lanes.cdgh = _mm_sha256rnds2_epu32(lanes.cdgh, lanes.abef, input);
        lanes.abef = _mm_sha256rnds2_epu32(lanes.abef, lanes.cdgh, _mm_shuffle_epi32(input, 0x0e));
    }
    lanes.abef = _mm_add_epi32(lanes.abef, before.abef);
    lanes.cdgh = _mm_add_epi32(lanes.cdgh, before.cdgh);
}

WITH_INSTRUCTIONS inline void add_blocks(Lanes &lanes, const uint8_t *blocks, size_t num_blocks) {
    for (const uint8_t *end = blocks + num_blocks * kBlock; blocks != end; blocks += kBlock)
        add_block(lanes, swapped(load(blocks)), swapped(load(blocks + 16)), swapped(load(blocks + 32)),
                  swapped(load(blocks + 48)));
}

WITH_INSTRUCTIONS void compress_by_instructions(State &state, const uint8_t *blocks, size_t num_blocks) {
    Lanes lanes = lanes_of(state);
    add_blocks(lanes, blocks, num_blocks);
    __m128i low, high;
    words_of(lanes, low, high);
    std::memcpy(state.data(), &low, sizeof low);
    std::memcpy(state.data() + 4, &high, sizeof high);
}

// The digest before stays in registers: each waits for the one before, and for nothing else.
WITH_INSTRUCTIONS void compress_chain_by_instructions(const Digest &before, const Chain &chain, Digest *out) {
    const Lanes start = lanes_of(kStart);
    __m128i low = swapped(load(before.data())), high = swapped(load(before.data() + 16));
    uint8_t *behind = chain.blocks + sizeof before;
    for (size_t index = 0; index < chain.num_pages; ++index) {
        const uint8_t *page = chain.pages + index * chain.page_bytes;
        if (chain.page_bytes == sizeof(int32_t))  // a call would put the digest into memory meanwhile
            std::memcpy(behind, page, sizeof(int32_t));
        else
            std::memcpy(behind, page, chain.page_bytes);
        Lanes lanes = start;
        add_block(lanes, low, high, swapped(load(behind)), swapped(load(behind + 16)));
        add_blocks(lanes, chain.blocks + kBlock, chain.num_blocks - 1);
        words_of(lanes, low, high);
        __m128i digest[2] = {swapped(low), swapped(high)};
        std::memcpy(out[index].data(), digest, sizeof digest);
    }
}

bool has_instructions() {
    constexpr unsigned kSsse3 = 1u << 9, kSse41 = 1u << 19, kSha = 1u << 29;
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & kSsse3) && (c & kSse41) && __get_cpuid_count(7, 0, &a, &b, &c, &d) &&
           (b & kSha);
}

const Compress kFastest = has_instructions() ? compress_by_instructions : compress_portably;
const CompressChain kFastestChain = has_instructions() ? compress_chain_by_instructions : compress_chain_portably;

#else

const Compress kFastest = compress_portably;
const CompressChain kFastestChain = compress_chain_portably;

#endif

}  // namespace

Digest sha256(const uint8_t *prefix, size_t prefix_size, const uint8_t *data, size_t size, bool portably) {
    Compress compress = portably ? compress_portably : kFastest;
    State state = kStart;
    const uint64_t num_bytes = prefix_size + size;
    // The prefix with what of the data fits in behind it, and later the data's end.
    std::array<uint8_t, 2 * kBlock> edge;
    size_t filled = 0;
    for (auto [from, left] : {std::pair(prefix, prefix_size), std::pair(data, size)}) {
        if (left == 0)
            continue;  // there may be no address either
        if (filled != 0) {
            size_t part = std::min(kBlock - filled, left);
            std::memcpy(edge.data() + filled, from, part);
            filled += part;
            from += part;
            left -= part;
            if (filled == kBlock) {
                compress(state, edge.data(), 1);
                filled = 0;
            }
        }
        if (left >= kBlock)
            compress(state, from, left / kBlock);
        std::memcpy(edge.data() + filled, from + left / kBlock * kBlock, left % kBlock);
        filled += left % kBlock;
    }
    size_t end = pad(edge.data(), filled, num_bytes);
    compress(state, edge.data(), end / kBlock);
    Digest digest;
    write_digest(state, digest.data());
    return digest;
}

void sha256_chain(const Digest &before, const uint8_t *pages, size_t page_bytes, size_t num_pages, Digest *out,
                  bool portably) {
    size_t size = before.size() + page_bytes;
    std::vector<uint8_t> blocks(size + 2 * kBlock);
    size_t num_blocks = pad(blocks.data(), size, size) / kBlock;
    CompressChain compress = portably ? compress_chain_portably : kFastestChain;
    compress(before, Chain{pages, page_bytes, num_pages, blocks.data(), num_blocks}, out);
}

}  // namespace aradix
