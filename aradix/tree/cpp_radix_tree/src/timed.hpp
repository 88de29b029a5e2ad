// Priorities that were given for a time.
#pragma once

#include <unordered_map>

#include "leaf_heap.hpp"

namespace aradix {

// When a priority ends, and the priority after it.
struct Timed {
    int64_t expires;
    int64_t after;
    bool operator==(const Timed &) const = default;
};

// The nodes that have one, by when it ends. Few have: a node only says whether it is among them.
class TimedPriorities {
public:
    Timed &of(Handle node) { return timed_.at(node); }
    const Timed &of(Handle node) const { return timed_.at(node); }
    // The first to end; kNone if there is none.
    Handle first() const { return by_end_.least(); }

    void put(Handle node, Timed timed, uint64_t order) {
        timed_.insert_or_assign(node, timed);
        by_end_.put(node, Rank{timed.expires, 0}, order);
    }
    void discard(Handle node) {
        timed_.erase(node);
        by_end_.discard(node);
    }

private:
    std::unordered_map<Handle, Timed> timed_;
    Places places_;
    LeafHeap by_end_{places_};
};

}  // namespace aradix
