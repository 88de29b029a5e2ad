// Slots of whole pages, and the numbers of these pages: page k has the slots from k * page_size on.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

namespace aradix {

// Writes the pages of `count` slots. False, and then `pages` is written to all the same, unless the slots are whole pages,
// each in ascending order, and small enough.
inline bool pages_of(const int64_t *slots, size_t count, size_t page_size, int32_t *pages) {
    if (page_size == 1) {
        uint64_t all = 0;
        for (size_t index = 0; index < count; ++index) {
            all |= static_cast<uint64_t>(slots[index]);
            pages[index] = static_cast<int32_t>(slots[index]);
        }
        return all <= INT32_MAX;
    }
    if (count % page_size != 0)
        return false;
    const auto size = static_cast<int64_t>(page_size);
    for (size_t begin = 0; begin < count; begin += page_size) {
        int64_t first = slots[begin], page = first / size;
        if (first < 0 || page > INT32_MAX || page * size != first)
            return false;
        int64_t differ = 0;
        for (int64_t index = 1; index < size; ++index)
            differ |= slots[begin + static_cast<size_t>(index)] ^ (first + index);
        if (differ != 0)
            return false;
        *pages++ = static_cast<int32_t>(page);
    }
    return true;
}

// Writes the slots of `count` tokens from token `first` of the pages on.
inline void slots_of(const int32_t *pages, size_t first, size_t count, size_t page_size, int64_t *out) {
    if (page_size == 1) {
        for (size_t index = 0; index < count; ++index)
            out[index] = pages[first + index];
        return;
    }
    size_t page = first / page_size, inside = first % page_size;
    while (count != 0) {
        size_t part = page_size - inside < count ? page_size - inside : count;
        int64_t slot = static_cast<int64_t>(pages[page]) * static_cast<int64_t>(page_size);
        for (size_t index = 0; index < part; ++index)
            out[index] = slot + static_cast<int64_t>(inside + index);
        out += part;
        count -= part;
        ++page;
        inside = 0;
    }
}

// Pages that were allocated together mostly follow one another, and what is done to as many as this of such pages is done
// at once.
constexpr size_t kPagesAtOnce = 16;

inline bool follow_one_another(const int32_t *pages) {
    const auto first = static_cast<uint32_t>(pages[0]);
    if (first > INT32_MAX - kPagesAtOnce)
        return false;
    // Two at a time, in the order of bytes of this machine.
    const uint32_t begin[2] = {first, first + 1}, two[2] = {2, 2};
    uint64_t expected, step, differ = 0;
    std::memcpy(&expected, begin, sizeof expected);
    std::memcpy(&step, two, sizeof step);
    for (size_t index = 0; index < kPagesAtOnce; index += 2) {
        uint64_t both;
        std::memcpy(&both, pages + index, sizeof both);
        differ |= both ^ expected;
        expected += step;
    }
    return differ == 0;
}

// Whether as many bytes from here on are all the same as `byte`.
inline bool are_all(const uint8_t *bytes, uint8_t byte) {
    static_assert(kPagesAtOnce == 2 * sizeof(uint64_t));
    uint64_t halves[2];
    std::memcpy(halves, bytes, kPagesAtOnce);
    const uint64_t wanted = byte * UINT64_C(0x0101010101010101);
    return ((halves[0] ^ wanted) | (halves[1] ^ wanted)) == 0;
}

}  // namespace aradix
