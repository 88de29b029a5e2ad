// The nodes of a tree, and the counters, the index and the events that must always agree with them.
//
// The steps in tree.cpp decide; whatever makes, splits, pins, merges or removes a node happens here, once, with all
// that follows from it. The order in which a user's policy is asked is that of the Python core.
#pragma once

#include <optional>

#include "ranking.hpp"
#include "recorded.hpp"
#include "reuse.hpp"
#include "timed.hpp"

namespace aradix {

struct Settings {
    size_t page_size;
    size_t item_bytes;
    bool whole_nodes;
    bool record_events;
    bool has_priorities;
    bool merge;
};

class Ledger {
public:
    Ledger(const Settings &settings, Policy policy, int64_t protected_from, UserPolicy user, nb::handle shares);
    Ledger(const Ledger &) = delete;
    Ledger &operator=(const Ledger &) = delete;

    int64_t version = 0;
    int64_t evictable_tokens = 0;
    int64_t protected_tokens = 0;
    int64_t detached_tokens = 0;
    int64_t num_nodes = 0;
    size_t num_namespaces() const { return static_cast<size_t>(PyDict_GET_SIZE(roots_.ptr())); }
    size_t page_size() const { return page_size_; }
    int64_t tick() const { return tick_; }
    const Ranking &ranking() const { return ranking_; }
    const Records &records() const { return records_; }
    int64_t stay() const { return reuse_ ? reuse_->stay() : 0; }

    nb::object take_events();
    // A RecordedEvents, or an empty tuple.
    nb::object take_recorded();
    // Called when the first event since the last of these is recorded, in the middle of a step; null for nobody.
    nb::object on_event;
    int traverse(visitproc visit, void *arg);
    void clear();

protected:
    // What keeps a policy, a finaliser or another thread from coming in while a step is under way.
    class Step {
    public:
        explicit Step(Ledger &ledger);
        ~Step() { ledger_.busy_ = false; }
        Step(const Step &) = delete;
        Step &operator=(const Step &) = delete;

    private:
        Ledger &ledger_;
    };

    Node &at(Handle handle) { return nodes_[handle]; }
    // Tokens in so many bytes of key. A shift, since every step asks at every node of its path.
    size_t count_of(size_t size) const { return size >> item_shift_; }
    int64_t items(size_t size) const { return static_cast<int64_t>(count_of(size)); }
    int64_t num_tokens(const Node &node) const { return items(node.tokens.size()); }

    // ---- finding ----

    // kNone if it is no more; `node_named` raises a KeyError then.
    Handle find_node(int64_t id) const;
    Handle node_named(int64_t id) const;
    Handle find_root(const nb::object &name_space);
    Handle find_child(Handle parent, const uint8_t *page) const;
    // Every node at or below one, a parent before its children, in order.
    void preorder(Handle top, std::vector<Handle> &found) const;
    std::vector<Handle> root_list(bool detached) const;
    Handle first_root() const { return live_roots_.first; }

    // ---- making and unmaking nodes ----

    Handle new_root(const nb::object &name_space);
    Handle new_leaf(Handle parent, const uint8_t *tokens, size_t size, SlotRun slots);
    // Cut the first `size` bytes of a node off into a new parent, which is returned. The fingerprint of the path to where it
    // is cut may be known.
    Handle split(Handle tail, size_t size, std::optional<uint64_t> fingerprint = std::nullopt);
    void remove_leaf(Handle leaf, bool merge);
    // Have the processor fetch what removing the leaves after a victim will touch: in a wide tree each of them lies
    // somewhere else, and waiting for memory would be most of the work.
    void fetch_ahead(Handle victim) const;
    // Likewise what a walk will look at below a node, where there is only one way to go.
    void fetch_below(const Node &node) const;
    void trim(Handle leaf, int64_t count);
    void prune(Handle root);
    void remove_root(Handle root, bool keep);
    void unlink(Handle child);
    void file_child(Handle child);
    void unfile_child(Handle child);
    void forget(Handle handle);
    void drop_detached(Handle node, nb::list &freed);

    // ---- pins, ranks, merging ----

    // From the end of a path up to, and without, a node that is locked already.
    void lock(Handle bottom, Handle locked = kNone);
    void unlock(Handle bottom, nb::list &freed);
    // The ready events of a path, and the depth of the highest place at which neighbours may have become equal, by its
    // becoming the most recent: 0, where a policy may look at more than that.
    struct Touched {
        nb::object ready;
        size_t from;
    };
    // Make a whole path the most recent.
    Touched touch(Handle bottom);
    // The same and `lock` or `unlock`, in one walk, where nobody asks for ready events.
    size_t touch_and_lock(Handle bottom);
    size_t touch_and_unlock(Handle bottom, nb::list &freed);
    void refile(Handle handle);
    void count_hits(Handle handle, int64_t num_hits);
    // Give a new leaf the uses that are known of its tokens; parts of it that differ become nodes of their own.
    void recall(Handle leaf, const uint8_t *tokens);
    // Merge what became equal at a node and on the path above it, down from a depth; the node at its end then.
    Handle merge_path(Handle bottom, size_t from = 0);
    bool try_merge(Handle parent);

    // ---- priorities ----

    // An insert of this priority went through a path.
    void raise_priorities(Handle bottom, int64_t priority) {
        for (Handle handle = bottom; handle != kNone; handle = at(handle).parent) {
            Node &node = at(handle);
            int64_t &raised = node.timed ? timed_.of(handle).after : node.priority;
            if (raised < priority)
                raised = priority;
            else if (!has_priorities_)
                return;  // nothing but inserts gives one, so it is as high all the way up
        }
    }
    // Give a node a priority of its own until a time, or for good at 0.
    void set_priority(Handle handle, int64_t priority, int64_t expires);
    void untime(Handle handle);
    bool same_time(Handle first, Handle second) const {
        if (!nodes_[first].timed && !nodes_[second].timed)
            return true;
        return nodes_[first].timed && nodes_[second].timed && timed_.of(first) == timed_.of(second);
    }

    // ---- slots and events ----

    nb::object slots_copy(const Node &node, int64_t first) const;
    nb::object freed_record(const nb::object &slots, const nb::object &streams) const;
    void record_removed(PageSpans pages);
    void record_cleared();
    // From now on the collector has to look at the marks of nodes.
    void note_marks(const nb::object &marks) { marked_ = marked_ || marks.is_valid(); }
    bool has_marks() const { return marked_; }

    Records records_;
    size_t page_size_, item_bytes_, page_bytes_;
    int item_shift_;
    bool whole_nodes_, records_events_, has_priorities_;
    Arena<Node> nodes_;
    Shares shares_;
    Ranking ranking_;
    std::unique_ptr<ReuseRecord> reuse_;  // under `tenure`
    TimedPriorities timed_;

private:
    uint64_t page_hash(const uint8_t *page) const { return hash_page(page, page_bytes_, seed_); }
    static uint64_t child_hash(Handle parent, uint64_t page_hash) {
        return page_hash ^ ((parent + uint64_t{1}) * 0x9e3779b97f4a7c15);
    }
    static uint64_t id_hash(int64_t id) { return mix(static_cast<uint64_t>(id), 0x9e3779b97f4a7c15); }

    // Walks up a path, and makes it the most recent.
    struct Touching {
        int64_t tick, below;  // when the node below was used last
        size_t from = SIZE_MAX;

        void operator()(Node &node) {
            if (node.last_access != below)
                from = node.depth;
            below = std::exchange(node.last_access, tick);
        }
    };
    Touching touching(Handle bottom);
    void lock_one(Node &node);
    template <class Each> void unlock_each(Handle bottom, nb::list &freed, Each each);

    void link(Handle parent, Handle child);
    void append_sibling(Siblings &siblings, Handle handle);
    void remove_sibling(Siblings &siblings, Handle handle);
    void take_place(Handle old, Handle heir);
    Siblings children_of(Handle parent) const { return {nodes_[parent].first_child, nodes_[parent].last_child}; }
    void set_children(Handle parent, const Siblings &siblings);
    void record_stored(Handle leaf);
    void record(Event event);

    uint64_t seed_;
    int64_t tick_ = 0;
    int64_t last_id_ = 0;
    HandleTable ids_;
    HandleTable children_;  // but for only ones
    nb::dict roots_;
    Siblings live_roots_, detached_roots_;
    nb::object last_name_space_;
    Handle last_root_ = kNone;
    EventLog events_;
    bool marked_ = false;
    bool busy_ = false;
};

}  // namespace aradix
