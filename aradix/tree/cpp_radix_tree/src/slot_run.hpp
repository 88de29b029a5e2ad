// The slots of one node, or of one lease.
#pragma once

#include "bytes.hpp"
#include "pages.hpp"

namespace aradix {

// An allocator hands out whole pages, and then a page's number says all of its slots: 4 bytes a page. Slots that are no
// whole pages, or too large for that, are kept one by one in 8 bytes each. Which of the two is decided run by run.
class SlotRun {
public:
    SlotRun() = default;
    SlotRun(const int64_t *slots, size_t count, size_t page_size) { append(slots, count, page_size); }

    void fetch() const { bytes_.fetch(); }
    bool is_wide() const { return wide_; }
    size_t count(size_t page_size) const {
        return wide_ ? bytes_.size() / sizeof(int64_t) : num_pages() * page_size;
    }

    // Where it is not wide.
    const int32_t *pages() const { return reinterpret_cast<const int32_t *>(bytes_.data()); }
    size_t num_pages() const { return bytes_.size() / sizeof(int32_t); }
    // Room for so many more pages at the end, to be written by the caller.
    int32_t *extend(size_t num_pages) {
        return reinterpret_cast<int32_t *>(bytes_.extend(num_pages * sizeof(int32_t)));
    }

    void append(const int64_t *slots, size_t count, size_t page_size) {
        if (!wide_) {
            size_t num_pages = count / page_size;
            if (pages_of(slots, count, page_size, extend(num_pages)))
                return;
            bytes_.drop_back(num_pages * sizeof(int32_t));
            widen(page_size);
        }
        bytes_.append(reinterpret_cast<const uint8_t *>(slots), count * sizeof(int64_t));
    }

    // Where it is wide: writes the pages of `count` tokens from token `first` on; false where they are no whole pages.
    bool read_pages(int32_t *out, size_t first, size_t count, size_t page_size) const {
        return pages_of(reinterpret_cast<const int64_t *>(bytes_.data()) + first, count, page_size, out);
    }

    // Writes the slots of `count` tokens from token `first` on.
    void copy_to(int64_t *out, size_t first, size_t count, size_t page_size) const {
        if (!wide_)
            slots_of(pages(), first, count, page_size, out);
        else if (count != 0)
            std::memcpy(out, bytes_.data() + first * sizeof(int64_t), count * sizeof(int64_t));
    }

    // Cuts the slots of the first `count` tokens off. Where that is no whole page, all of them are kept one by one.
    SlotRun split_front(size_t count, size_t page_size) {
        if (count % page_size != 0)
            widen(page_size);
        SlotRun head;
        head.wide_ = wide_;
        head.bytes_ = bytes_.split_front(bytes_of(count, page_size));
        return head;
    }

    void join_front(SlotRun &&head, size_t page_size) {
        if (wide_ != head.wide_) {
            widen(page_size);
            head.widen(page_size);
        }
        bytes_.join_front(std::move(head.bytes_));
    }

    void drop_back(size_t count, size_t page_size) {
        if (count % page_size != 0)
            widen(page_size);
        bytes_.drop_back(bytes_of(count, page_size));
    }

    // Keeps no more room than it needs.
    void fit() { bytes_.fit(); }

private:
    size_t bytes_of(size_t count, size_t page_size) const {
        return wide_ ? count * sizeof(int64_t) : count / page_size * sizeof(int32_t);
    }

    void widen(size_t page_size) {
        if (wide_)
            return;
        Bytes slots;
        size_t size = count(page_size);
        copy_to(reinterpret_cast<int64_t *>(slots.extend(size * sizeof(int64_t))), 0, size, page_size);
        bytes_ = std::move(slots);
        wide_ = true;
    }

    Bytes bytes_;
    bool wide_ = false;
};

}  // namespace aradix
