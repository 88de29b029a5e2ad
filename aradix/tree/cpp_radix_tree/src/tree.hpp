// The steps of the tree: what aradix.tree.protocol.TreeCore promises, one method each.
#pragma once

#include "ledger.hpp"
#include "hold.hpp"
#include "page_table.hpp"

namespace aradix {

// What came of a lease that grows: slots taken beyond those evicted, tokens evicted, whether it grew.
struct Growth {
    int64_t num_taken, num_evicted;
    bool grew;
};

// What came of a commit; `duplicates` may be None.
struct Published {
    int64_t held, end;
    nb::object last, duplicates;
};

class Tree : public Ledger {
public:
    using Ledger::Ledger;

    nb::object match(nb::handle key, std::optional<int64_t> limit, bool pin, bool past_pending);
    int64_t peek(nb::handle key);
    nb::object insert(nb::handle key, nb::handle slots, nb::handle priority, nb::handle ready, bool past_pending,
                      int64_t held_hits, int64_t new_hits);
    nb::object extend(int64_t node_id, nb::handle key, nb::handle slots, nb::handle priority, nb::handle ready);

    int64_t pin(nb::handle ref);
    nb::object unpin(int64_t node_id, bool touch);
    void record_hit(int64_t node_id);
    void mark_streams(int64_t node_id, nb::handle streams);
    void prioritize(int64_t node_id, int64_t start, int64_t stop, nb::handle priority, int64_t expires);
    void decay(int64_t now);

    nb::object evict(nb::handle num_tokens, nb::handle name_space, nb::handle demand, bool only_excess);
    // The plain case of what a lease does (short_ways.cpp). False or nothing: it is not plain, and nothing was changed.
    bool enter_hold(Hold &hold);
    std::optional<Growth> grow_hold(Hold &hold, PageTable &table, int64_t num_tokens, int state);
    std::optional<Published> publish_hold(Hold &hold, PageTable &table, nb::handle key, int state);
    // The number of slots given back; those of the tree stay there.
    std::optional<int64_t> leave_hold(Hold &hold, PageTable &table, int state);
    // The slots of its tokens, the tree's and its own.
    nb::object slots_of_hold(const Hold &hold);
    nb::object detach(nb::handle name_space);

    uint32_t share_of(nb::handle name_space);
    void charge(uint32_t share, int64_t num_tokens);
    nb::object shares();

    nb::object close_gate(nb::handle key);
    void set_gate(int64_t node_id, int gate);
    nb::object open_gate(int64_t node_id);
    nb::object pin_below(int64_t node_id);
    nb::object evict_below(int64_t node_id);

    nb::object slots_of(nb::handle ref, int64_t start);
    bool is_detached(int64_t node_id);
    int64_t lock_ref(int64_t node_id);
    bool is_below(int64_t node_id, int64_t ancestor_id);
    nb::object namespaces();
    nb::object view(int64_t node_id);
    nb::object child_ids(int64_t node_id);
    nb::object walk(bool detached);

    nb::object roots();
    nb::object glance(int64_t node_id, bool children);
    nb::object look(nb::handle key);
    int64_t next_victim();

private:
    // Where a walk ended: the last whole node, the child matched in part and by how many bytes, or the gate met.
    struct Place {
        Handle node;
        Handle child = kNone;
        size_t size = 0;
        int64_t gate = 0;
    };
    struct Grown {
        Handle node;
        size_t held, end;
        nb::object existing, ready;
        size_t from;  // the highest place at which neighbours may have become equal
    };

    Key read_key(nb::handle key, std::optional<int64_t> limit = std::nullopt) const {
        return Key(records_, key, page_size_, page_bytes_, limit);
    }
    const nb::object &ready_or_nothing(const nb::object &ready) const {
        return ready.is_valid() ? ready : records_.nothing;
    }
    // From a root, which may have a gate itself.
    Place enter(const Key &key, Handle root, bool past_pending);
    Place descend(const Key &key, Handle from, int stopped_by);
    // The node that ends where a walk ended, split off if need be.
    Handle arrive(const Place &place) { return place.child == kNone ? place.node : split(place.child, place.size); }
    size_t depth_of(const Place &place) const { return nodes_[place.node].depth + place.size; }
    // `fresh` are the slots from where the walk ended up to byte `stop`.
    Grown grow(Handle origin, const Key &key, SlotRun fresh, size_t stop, const Place &place, int64_t priority,
               const nb::object &ready, int64_t held_hits = 1, int64_t new_hits = 0);
    SlotRun fresh_run(const Slots &slots, size_t start, size_t stop, const Place &place) const;
    template <class Give> void shrink(int64_t count, bool only_excess, Give give);
    nb::list evict_tokens(int64_t count, bool only_excess);
    // Evicts so many tokens. Their pages go to `out`, and what has no room there is added to `spare_pages_`; how many pages.
    int64_t evict_pages(int64_t count, int32_t *out, int64_t room);
    void count_hit(Handle bottom);
    void copy_slots(Handle node, size_t start, size_t stop, int64_t *out);
    nb::list unpin_node(Handle handle, bool touched);
    struct At {
        Handle node;
        size_t depth;
    };
    // The node that a place is in. KeyError if the place is no more.
    At node_at(nb::handle ref);
    // The slots from byte `start` to byte `stop` of a path: a copy.
    nb::object slots_between(Handle node, size_t start, size_t stop);
    nb::object shown(Handle handle, const nb::object &name_space);

    std::vector<int32_t> spare_pages_;  // of the call under way; kept for its block
};

}  // namespace aradix
