#include "sha256.hpp"

#include <bit>
#include <cstring>

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
using Compress = void (*)(State &state, const uint8_t *block);

void compress_portably(State &state, const uint8_t *block) {
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

#ifdef ARADIX_SHA_INSTRUCTIONS

__m128i *vectors(State &state) { return reinterpret_cast<__m128i *>(state.data()); }

__attribute__((target("sha,sse4.1"))) void compress_by_instructions(State &state, const uint8_t *block) {
    // The instructions want the words in the order ABEF and CDGH, and four rounds at a time.
    const __m128i kBigEndian = _mm_set_epi64x(0x0c0d0e0f08090a0b, 0x0405060700010203);
    __m128i low = _mm_shuffle_epi32(_mm_loadu_si128(vectors(state)), 0xb1);
    __m128i high = _mm_shuffle_epi32(_mm_loadu_si128(vectors(state) + 1), 0x1b);
    __m128i abef = _mm_alignr_epi8(low, high, 8), cdgh = _mm_blend_epi16(high, low, 0xf0);
    const __m128i abef_before = abef, cdgh_before = cdgh;
    __m128i words[4];
    for (size_t four = 0; four < 16; ++four) {
        __m128i &now = words[four % 4];
        if (four < 4) {
            now = _mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i *>(block) + four), kBigEndian);
        } else {
            __m128i last = words[(four + 3) % 4];
            __m128i sum = _mm_add_epi32(_mm_sha256msg1_epu32(now, words[(four + 1) % 4]),
                                        _mm_alignr_epi8(last, words[(four + 2) % 4], 4));
            now = _mm_sha256msg2_epu32(sum, last);
        }
        __m128i input = _mm_add_epi32(now, _mm_loadu_si128(reinterpret_cast<const __m128i *>(kRound.data()) + four));
        cdgh = _mm_sha256rnds2_epu32(cdgh, abef, input);
        abef = _mm_sha256rnds2_epu32(abef, cdgh, _mm_shuffle_epi32(input, 0x0e));
    }
    abef = _mm_shuffle_epi32(_mm_add_epi32(abef, abef_before), 0x1b);
    cdgh = _mm_shuffle_epi32(_mm_add_epi32(cdgh, cdgh_before), 0xb1);
    _mm_storeu_si128(vectors(state), _mm_blend_epi16(abef, cdgh, 0xf0));
    _mm_storeu_si128(vectors(state) + 1, _mm_alignr_epi8(cdgh, abef, 8));
}

Compress fastest() {
    constexpr unsigned kSsse3 = 1u << 9, kSse41 = 1u << 19, kSha = 1u << 29;
    unsigned a, b, c, d;
    bool there = __get_cpuid(1, &a, &b, &c, &d) && (c & kSsse3) && (c & kSse41) &&
                 __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b & kSha);
    return there ? compress_by_instructions : compress_portably;
}

#else

Compress fastest() { return compress_portably; }

#endif

class Hasher {
public:
    explicit Hasher(Compress compress) : compress_block_(compress) {}

    void update(const uint8_t *data, size_t size) {
        total_ += size;
        while (size != 0) {
            size_t part = kBlock - filled_ < size ? kBlock - filled_ : size;
            std::memcpy(block_.data() + filled_, data, part);
            filled_ += part;
            data += part;
            size -= part;
            if (filled_ == kBlock)
                compress();
        }
    }

    Digest finish() {
        uint64_t num_bits = total_ * 8;
        block_[filled_++] = 0x80;
        if (filled_ > kBlock - 8) {
            std::memset(block_.data() + filled_, 0, kBlock - filled_);
            compress();
        }
        std::memset(block_.data() + filled_, 0, kBlock - 8 - filled_);
        for (size_t index = 0; index < 8; ++index)
            block_[kBlock - 1 - index] = static_cast<uint8_t>(num_bits >> (8 * index));
        compress();
        Digest digest;
        for (size_t index = 0; index < digest.size(); ++index)
            digest[index] = static_cast<uint8_t>(state_[index / 4] >> (24 - 8 * (index % 4)));
        return digest;
    }

private:
    static constexpr size_t kBlock = 64;

    void compress() {
        compress_block_(state_, block_.data());
        filled_ = 0;
    }

    Compress compress_block_;
    State state_ = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                      0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
    std::array<uint8_t, kBlock> block_;
    size_t filled_ = 0;
    uint64_t total_ = 0;
};

}  // namespace

Digest sha256(const uint8_t *prefix, size_t prefix_size, const uint8_t *data, size_t size, bool portably) {
    static const Compress kFastest = fastest();
    Hasher hasher(portably ? compress_portably : kFastest);
    hasher.update(prefix, prefix_size);
    hasher.update(data, size);
    return hasher.finish();
}

}  // namespace aradix
