// Names of nodes inside the core, and a table that finds them.
#pragma once

#include <cstdint>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#include <vector>

namespace aradix {

using Handle = uint32_t;
constexpr Handle kNone = UINT32_MAX;

__extension__ typedef unsigned __int128 Wide;

inline uint64_t mix(uint64_t first, uint64_t second) {
    Wide product = static_cast<Wide>(first) * second;
    return static_cast<uint64_t>(product) ^ static_cast<uint64_t>(product >> 64);
}

// 64 bits of a page of tokens, in the manner of wyhash; `size` is a multiple of 4. With a secret seed, keys that all
// fall together cannot be made up by whoever writes the prompts.
inline uint64_t hash_page(const uint8_t *page, size_t size, uint64_t seed) {
    constexpr uint64_t kFirst = 0xa0761d6478bd642f, kSecond = 0xe7037ed1a0b428db, kThird = 0x8ebc6af09c88c6e3;
    uint64_t hash = seed ^ (size * kThird);
    while (size >= 16) {
        uint64_t words[2];
        std::memcpy(words, page, 16);
        hash = mix(words[0] ^ kFirst, words[1] ^ hash);
        page += 16;
        size -= 16;
    }
    uint64_t rest[2] = {0, 0};
    std::memcpy(rest, page, size);
    return mix(mix(rest[0] ^ kFirst, rest[1] ^ hash) ^ kSecond, hash ^ kThird);
}

// Nodes that never move, in blocks; a handle is used again once its node is freed, and a block is given back once all
// of its nodes are. Free nodes are chained through `next`. A node that is made again is as new, unless it is nothing but
// numbers: then its maker writes all of them.
template <class Node> class Arena {
public:
    Node &operator[](Handle handle) { return blocks_[handle / kBlock].nodes[handle % kBlock]; }
    const Node &operator[](Handle handle) const { return blocks_[handle / kBlock].nodes[handle % kBlock]; }

    Handle make() {
        if (open_.empty())
            open_block();
        Block &block = blocks_[open_.back()];
        Handle handle = block.free;
        Node &node = (*this)[handle];
        block.free = std::exchange(node.next, kNone);
        ++block.num_used;
        if (block.free == kNone)
            open_.pop_back();
        return handle;
    }

    // Never allocates: every block has its place among the open ones.
    void free(Handle handle) {
        Node &node = (*this)[handle];
        // What it held may be the last of its kind, and goes when all is in order.
        [[maybe_unused]] Node gone(std::move(node));
        if constexpr (!std::is_trivially_destructible_v<Node>) {
            std::destroy_at(&node);
            std::construct_at(&node);
        }
        Handle number = handle / kBlock;
        Block &block = blocks_[number];
        if (block.free == kNone) {
            block.place = open_.size();
            open_.push_back(number);
        }
        node.next = block.free;
        block.free = handle;
        if (--block.num_used == 0 && open_.size() > 1)
            close_block(number);
    }

    template <class Visit> void for_each(Visit visit) {
        for (Handle number = 0; number < blocks_.size(); ++number)
            for (Handle index = 0; blocks_[number].nodes && index < kBlock; ++index)
                visit(number * kBlock + index);
    }

private:
    static constexpr Handle kBlock = 64;

    struct Block {
        std::unique_ptr<Node[]> nodes;
        Handle free = kNone;
        Handle num_used = 0;
        size_t place = 0;  // among the open blocks, where one of its nodes is free
    };

    void open_block() {
        auto nodes = std::make_unique<Node[]>(kBlock);
        spare_.reserve(blocks_.size() + 1);
        open_.reserve(blocks_.size() + 1);
        if (spare_.empty()) {
            spare_.push_back(static_cast<Handle>(blocks_.size()));
            blocks_.emplace_back();
        }
        Handle number = spare_.back();
        spare_.pop_back();
        for (Handle index = 0; index < kBlock; ++index)
            nodes[index].next = index + 1 < kBlock ? number * kBlock + index + 1 : kNone;
        blocks_[number].nodes = std::move(nodes);
        blocks_[number].free = number * kBlock;
        blocks_[number].place = open_.size();
        open_.push_back(number);
    }

    void close_block(Handle number) {
        Block &block = blocks_[number];
        open_[block.place] = open_.back();
        blocks_[open_.back()].place = block.place;
        open_.pop_back();
        block.nodes.reset();
        block.free = kNone;
        spare_.push_back(number);
    }

    std::vector<Block> blocks_;
    std::vector<Handle> open_;
    std::vector<Handle> spare_;
};

// Handles by hash: open addressing, linear probing, and no tombstones. The caller says which of those with the same
// hash is meant.
class HandleTable {
public:
    template <class IsIt> Handle find(uint64_t hash, IsIt is_it) const {
        if (count_ == 0)
            return kNone;
        for (size_t at = hash & mask(); entries_[at].handle != kNone; at = (at + 1) & mask())
            if (entries_[at].hash == hash && is_it(entries_[at].handle))
                return entries_[at].handle;
        return kNone;
    }

    // Have the processor fetch where a hash is looked for, and what may move up from behind it.
    void fetch(uint64_t hash) const {
        size_t at = hash & mask();
        __builtin_prefetch(&entries_[at], 1);
        __builtin_prefetch(&entries_[(at + 4) & mask()], 1);
    }

    void insert(uint64_t hash, Handle handle) {
        if (4 * (count_ + 1) > 3 * entries_.size())
            resize(entries_.empty() ? kLeast : 2 * entries_.size());
        place(Entry{hash, handle});
        ++count_;
    }

    void erase(uint64_t hash, Handle handle) {
        size_t hole = position(hash, handle);
        for (size_t at = (hole + 1) & mask(); entries_[at].handle != kNone; at = (at + 1) & mask()) {
            // An entry may move back unless that put it before the place where its search begins.
            if (((at - entries_[at].hash) & mask()) >= ((at - hole) & mask())) {
                entries_[hole] = entries_[at];
                hole = at;
            }
        }
        entries_[hole].handle = kNone;
        --count_;
        if (entries_.size() > kLeast && 8 * count_ < entries_.size())
            resize(entries_.size() / 2);
    }

    // Another node takes the place of one.
    void replace(uint64_t hash, Handle handle, Handle other) { entries_[position(hash, handle)].handle = other; }

private:
    struct Entry {
        uint64_t hash = 0;
        Handle handle = kNone;
    };
    static constexpr size_t kLeast = 64;

    size_t mask() const { return entries_.size() - 1; }

    size_t position(uint64_t hash, Handle handle) const {
        size_t at = hash & mask();
        while (entries_[at].handle != handle)
            at = (at + 1) & mask();
        return at;
    }

    void place(Entry entry) {
        size_t at = entry.hash & mask();
        while (entries_[at].handle != kNone)
            at = (at + 1) & mask();
        entries_[at] = entry;
    }

    void resize(size_t size) {
        std::vector<Entry> old(size);
        old.swap(entries_);
        for (const Entry &entry : old)
            if (entry.handle != kNone)
                place(entry);
    }

    std::vector<Entry> entries_;
    size_t count_ = 0;
};

}  // namespace aradix
