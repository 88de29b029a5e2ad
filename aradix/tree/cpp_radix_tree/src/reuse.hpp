// What a tree remembers of how its tokens were used, evicted ones too; `aradix/tree/reuse.py` explains it.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "node.hpp"

namespace aradix {

// Uses by half doublings, as `use_class` of aradix.policies has them.
inline int use_class(int64_t uses) {
    if (uses < 2)
        return 0;
    int doublings = static_cast<int>(std::bit_width(static_cast<uint64_t>(uses))) - 1;
    return std::min(15, 2 * doublings + static_cast<int>(uses >> (doublings - 1) & 1) - 1);
}
constexpr int64_t use_credit(int of_uses) { return of_uses == 0 ? 0 : of_uses + 1; }

class ReuseRecord {
public:
    static constexpr int kClasses = 16, kEpochs = 512, kRungs = 11, kMinShift = 2;

    struct Run {
        int64_t num_tokens, uses;
        uint64_t fingerprint;  // of the path to its end
    };

    ReuseRecord(size_t page_size, size_t item_bytes);

    int64_t stay() const { return stay_of(rung_) << shift_; }
    static int64_t rank(const Node &node, int64_t stay) {
        return 2 * node.last_access + stay * use_credit(node.of_uses);
    }

    // So many tokens are held as some have to go. What leases have taken for a moment is not gone for good.
    void note_capacity(int64_t num_tokens);
    // `of_uses` of a new node, and of one whose count changed in any other way than by a hit.
    static void classify(Node &node) { node.of_uses = static_cast<uint8_t>(use_class(node.uses())); }
    // The hit count of a node is about to rise.
    void hit(Node &node, int64_t num_hits, int64_t tick);
    void merge(Node &parent, Node &child);
    // The runs of a new leaf, from the left; the leaf is filed as the last one says, the caller splits the others off.
    // They stay until the next call. Its tokens are read where they came from: the copy may still be on its way to memory.
    const std::vector<Run> &welcome(Node &leaf, const uint8_t *tokens, uint64_t base, int64_t tick);
    // The last `count` tokens of a node are about to go, evicted. `above` is its parent's fingerprint.
    void leave(Node &node, int64_t count, uint64_t above);
    void drop(const Node &node);
    void split(Node &head, const Node &tail, uint64_t above) const;
    // Whether leaves rank otherwise now.
    bool advance(int64_t tick);

private:
    // By epoch first: what a step uses was mostly used last in one step too, so its counts lie side by side.
    using Table = std::array<std::array<int64_t, kClasses>, kEpochs>;
    // What is remembered of evicted tokens, in the order in which they went.
    struct Ghost {
        uint64_t key = 0;
        int64_t num_tokens = 0, uses = 0, last_use = 0;
        Handle previous = kNone;
        Handle next = kNone;
    };

    static int64_t stay_of(int rung) { return rung == 0 ? 0 : int64_t{1} << (rung - 1); }
    static size_t place(int64_t epoch) { return static_cast<size_t>(epoch) % kEpochs; }
    int64_t tokens_in(size_t size) const { return static_cast<int64_t>(size / item_bytes_); }
    int64_t epoch_of(int64_t tick) const { return tick >> shift_; }
    int64_t first_epoch() const { return std::max<int64_t>(0, epoch_ - kEpochs + 1); }

    void add(int64_t num_tokens, int of_uses, int64_t last_use);
    static uint64_t hash_of(uint64_t key) { return mix(key, 0x9e3779b97f4a7c15); }
    Handle find_ghost(uint64_t key) const;
    void remember(uint64_t key, int64_t num_tokens, const Node &node);
    Ghost forget(Handle ghost);
    int64_t tokens_at(int64_t level, int rung) const;
    void clear_oldest();
    void settle_all();
    void settle(int rung);
    int64_t part(int rung) const;
    void recount();
    void widen();
    void narrow(int64_t tick);
    void score(int64_t num_tokens, int of_uses, int64_t last_use);
    void tell_all();
    void find_bounds();
    void find_slack();
    void make_room();
    void note_gains();
    int64_t in_capacities(int64_t score) const;
    bool is_sure(int rung) const;
    void choose();

    size_t page_size_, item_bytes_;
    int rung_ = 0;
    int shift_ = kMinShift;
    int64_t epoch_ = 0;
    int64_t horizon_ = 0;  // ticks before it are no longer in the table, whatever its epochs are now
    Table table_{};
    int64_t capacity_ = 0;  // tokens that the cache holds when it has to evict; 0 before it ever had to
    int64_t lowered_ = 0;   // the epoch in which that last fell
    std::array<int64_t, kRungs> cuts_{}, held_{}, below_{}, found_{};
    // For each class, twice the epoch from which on every candidate holds it, and one below which none does, not even in
    // part. Most of what is used is held by all: that is added up here, and told to them when an epoch is over, or when
    // it is more than what some of them have room for.
    std::array<int64_t, kClasses> held_by_all_{}, held_by_none_{};
    int64_t found_by_all_ = 0, newly_held_by_all_ = 0, slack_ = 0;
    std::array<int64_t, kRungs> leads_{}, gains_{}, squares_{};
    std::vector<Run> runs_;
    Arena<Ghost> ghosts_;
    HandleTable by_key_;
    Handle oldest_ = kNone, newest_ = kNone;
    int64_t ghost_tokens_ = 0;
};

}  // namespace aradix
