// A run of bytes that grows at its end, and lets go at both ends.
#pragma once

#include <Python.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <new>
#include <utility>

namespace aradix {

// Owns one block. What is dropped stays in the block until less than half of it is in use, so that trimming a long run
// page by page costs what it drops, and memory still follows what is held. Blocks are Python's, so tracemalloc sees
// them.
class Bytes {
public:
    Bytes() = default;
    Bytes(const uint8_t *from, size_t size) { append(from, size); }
    Bytes(Bytes &&other) noexcept { swap(other); }
    Bytes &operator=(Bytes &&other) noexcept {
        Bytes taken(std::move(other));
        swap(taken);
        return *this;
    }
    Bytes(const Bytes &) = delete;
    Bytes &operator=(const Bytes &) = delete;
    ~Bytes() {
        if (block_ != nullptr)
            PyMem_RawFree(block_);
    }

    const uint8_t *data() const { return block_ + begin_; }
    size_t size() const { return size_; }
    bool empty() const { return size_ == 0; }

    // Have the processor fetch its begin, and what the allocator keeps in front of its block.
    void fetch() const {
        if (block_ == nullptr)
            return;
        __builtin_prefetch(reinterpret_cast<const void *>(reinterpret_cast<uintptr_t>(block_) - sizeof(size_t)), 1);
        __builtin_prefetch(data());
    }

    // And a few lines at its end.
    void fetch_end() const {
        constexpr size_t kLine = 64, kLines = 8;
        for (size_t line = 1; line <= kLines && line * kLine <= size_; ++line)
            __builtin_prefetch(data() + size_ - line * kLine);
    }

    // Room for `size` more bytes at the end, to be written by the caller.
    uint8_t *extend(size_t size) {
        if (begin_ + size_ + size > capacity_) {
            // The first content is taken as it is: most runs never grow.
            size_t wanted = size_ + size;
            move_to(size_ != 0 && wanted < size_ + size_ / 2 ? size_ + size_ / 2 : wanted);
        }
        uint8_t *room = block_ + begin_ + size_;
        size_ += size;
        return room;
    }

    void append(const uint8_t *from, size_t size) {
        if (size != 0)
            std::memcpy(extend(size), from, size);
    }

    void drop_back(size_t size) {
        size_ -= size;
        maybe_shrink();
    }

    void drop_front(size_t size) {
        begin_ += size;
        size_ -= size;
        maybe_shrink();
    }

    // Cuts the first `size` bytes off. The larger part keeps the block, so the cost is that of the smaller one.
    Bytes split_front(size_t size) {
        if (size == 0)
            return Bytes();
        if (size <= size_ / 2) {
            Bytes head(data(), size);
            drop_front(size);
            return head;
        }
        Bytes tail(data() + size, size_ - size);
        swap(tail);
        tail.drop_back(size_);
        return tail;
    }

    // Puts `head` in front. Where this is what a split left, the place in front is still there.
    void join_front(Bytes &&head) {
        if (head.size_ <= begin_ && head.size_ < size_) {
            begin_ -= head.size_;
            size_ += head.size_;
            std::memcpy(block_ + begin_, head.data(), head.size_);
            return;
        }
        head.append(data(), size_);
        swap(head);
    }

    // Gives back what was taken ahead for more to come.
    void fit() {
        if (capacity_ - size_ > size_ / 8 + kSmall)
            move_to(size_);
    }

private:
    static constexpr size_t kSmall = 64;

    void swap(Bytes &other) noexcept {
        std::swap(block_, other.block_);
        std::swap(begin_, other.begin_);
        std::swap(size_, other.size_);
        std::swap(capacity_, other.capacity_);
    }

    void maybe_shrink() {
        if (capacity_ > kSmall && size_ < capacity_ / 2)
            move_to(size_);
    }

    void move_to(size_t capacity) {
        if (begin_ == 0 && capacity != 0) {
            void *block = PyMem_RawRealloc(block_, capacity);
            if (block == nullptr)
                throw std::bad_alloc();
            block_ = static_cast<uint8_t *>(block);
        } else {
            auto *block = static_cast<uint8_t *>(capacity == 0 ? nullptr : PyMem_RawMalloc(capacity));
            if (block == nullptr && capacity != 0)
                throw std::bad_alloc();
            if (block != nullptr && size_ != 0)
                std::memcpy(block, data(), size_);
            PyMem_RawFree(block_);
            block_ = block;
            begin_ = 0;
        }
        capacity_ = capacity;
    }

    uint8_t *block_ = nullptr;
    size_t begin_ = 0;
    size_t size_ = 0;
    size_t capacity_ = 0;
};

// The first byte at which two runs differ, or `size`. Mostly they do not, which one memcmp says; else it finds the block,
// of falling size, and a loop the place in it.
inline size_t first_difference(const uint8_t *first, const uint8_t *second, size_t size) {
    if (size == 0 || std::memcmp(first, second, size) == 0)
        return size;
    size_t at = 0;
    for (size_t block : {size_t{8192}, size_t{256}, size_t{16}})
        while (at + block <= size && std::memcmp(first + at, second + at, block) == 0)
            at += block;
    while (at < size && first[at] == second[at])
        ++at;
    return at;
}

}  // namespace aradix
