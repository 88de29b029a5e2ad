// The slots of one node.
#pragma once

#include "bytes.hpp"

namespace aradix {

// An allocator hands out whole pages, and then a page's number says all of its slots: 4 bytes a page. Slots that are no
// whole pages, or too large for that, are kept one by one in 8 bytes each. Which of the two is decided run by run.
class SlotRun {
public:
    SlotRun() = default;

    SlotRun(const int64_t *slots, size_t count, size_t page_size) : wide_(!are_pages(slots, count, page_size)) {
        if (wide_) {
            bytes_.append(reinterpret_cast<const uint8_t *>(slots), count * sizeof(int64_t));
            return;
        }
        auto *pages = reinterpret_cast<int32_t *>(bytes_.extend(count / page_size * sizeof(int32_t)));
        if (page_size == 1) {
            for (size_t index = 0; index < count; ++index)
                pages[index] = static_cast<int32_t>(slots[index]);
            return;
        }
        for (size_t page = 0; page < count / page_size; ++page)
            pages[page] = static_cast<int32_t>(slots[page * page_size] / static_cast<int64_t>(page_size));
    }

    void fetch() const { bytes_.fetch(); }
    bool is_wide() const { return wide_; }

    // Writes the slots of `count` tokens from token `first` on.
    void copy_to(int64_t *out, size_t first, size_t count, size_t page_size) const {
        if (wide_) {
            if (count != 0)
                std::memcpy(out, bytes_.data() + first * sizeof(int64_t), count * sizeof(int64_t));
            return;
        }
        const auto *pages = reinterpret_cast<const int32_t *>(bytes_.data());
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

    // Cuts the slots of the first `count` tokens off, which are whole pages.
    SlotRun split_front(size_t count, size_t page_size) {
        SlotRun head;
        head.wide_ = wide_;
        head.bytes_ = bytes_.split_front(bytes_of(count, page_size));
        return head;
    }

    // Puts `head` in front; `count` is the number of slots in this run.
    void join_front(SlotRun &&head, size_t head_count, size_t count, size_t page_size) {
        if (wide_ != head.wide_) {
            widen(count, page_size);
            head.widen(head_count, page_size);
        }
        bytes_.join_front(std::move(head.bytes_));
    }

    void drop_back(size_t count, size_t page_size) { bytes_.drop_back(bytes_of(count, page_size)); }

private:
    static bool are_pages(const int64_t *slots, size_t count, size_t page_size) {
        const auto size = static_cast<int64_t>(page_size);
        if (page_size == 1) {
            uint64_t all = 0;
            for (size_t index = 0; index < count; ++index)
                all |= static_cast<uint64_t>(slots[index]);
            return all <= INT32_MAX;
        }
        for (size_t begin = 0; begin < count; begin += page_size) {
            int64_t first = slots[begin];
            if (first < 0 || first / size > INT32_MAX || first % size != 0)
                return false;
            int64_t differ = 0;
            for (int64_t index = 1; index < size; ++index)
                differ |= slots[begin + static_cast<size_t>(index)] ^ (first + index);
            if (differ != 0)
                return false;
        }
        return true;
    }

    size_t bytes_of(size_t count, size_t page_size) const {
        return wide_ ? count * sizeof(int64_t) : count / page_size * sizeof(int32_t);
    }

    void widen(size_t count, size_t page_size) {
        if (wide_)
            return;
        Bytes slots;
        copy_to(reinterpret_cast<int64_t *>(slots.extend(count * sizeof(int64_t))), 0, count, page_size);
        bytes_ = std::move(slots);
        wide_ = true;
    }

    Bytes bytes_;
    bool wide_ = false;
};

}  // namespace aradix
