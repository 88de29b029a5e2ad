#include "ranking.hpp"

#include <algorithm>

namespace aradix {

Ranking::Ranking(const Records &records, Arena<Node> &nodes, Shares &shares, Policy policy, int64_t protected_from,
                 UserPolicy user, size_t item_bytes, bool merges)
    : records_(records), nodes_(nodes), shares_(shares), policy_(policy), protected_from_(protected_from),
      user_(std::move(user)), item_bytes_(item_bytes), merges_(merges),
      heaps_(shares.num_indexes(), LeafHeap(places_)), lists_(shares.num_indexes()) {}

Rank Ranking::rank(const Node &node) const {
    switch (policy_) {
    case Policy::mru:
        return {-node.last_access, 0};
    case Policy::fifo:
        return {node.created, 0};
    case Policy::filo:
        return {-node.created, 0};
    case Policy::lfu:
        return {node.hit_count, node.last_access};
    case Policy::slru:
        return {node.hit_count >= protected_from_ ? 1 : 0, node.last_access};
    case Policy::priority:
        return {node.priority, node.last_access};
    case Policy::tenure:
        return {ReuseRecord::rank(node, stay_), 0};
    default:
        return {node.last_access, 0};
    }
}

nb::object Ranking::stats(const Node &node) const {
    return nb::cast(NodeStats{node.last_access, node.created, node.hit_count, node.uses(), node.priority,
                              static_cast<int64_t>(node.tokens.size() / item_bytes_)});
}

nb::object Ranking::user_leaf(Handle leaf) const {
    return records_.make(user_.leaf, integer(leaf), integer(static_cast<int64_t>(nodes_[leaf].order)));
}

void Ranking::file(Handle leaf) {
    uint32_t share = nodes_[leaf].share;
    if (shares_ && !is_filed(leaf))
        shares_.add_filed(share, 1);
    if (policy_ == Policy::user) {
        try {
            nb::object value = user_.policy.attr(records_.name_rank)(stats(nodes_[leaf]));
            user_index(share).attr("put")(user_leaf(leaf), value);
            nodes_[leaf].filed = true;
            return;
        } catch (nb::python_error &error) {
            failed(error);
        }
    }
    if (lists_leaves()) {
        if (nodes_[leaf].listed)
            unlist(leaf);
        if (put_at_an_end(lists_[share], leaf)) {
            heaps_[share].discard(leaf);
            return;
        }
    }
    heaps_[share].put(leaf, rank(nodes_[leaf]), nodes_[leaf].order);
}

bool Ranking::goes_before(Handle first, Handle second) const {
    const Node &one = nodes_[first], &other = nodes_[second];
    int64_t difference = rank(one).major - rank(other).major;
    return difference != 0 ? difference < 0 : one.order < other.order;
}

bool Ranking::put_at_an_end(List &list, Handle leaf) {
    Node &node = nodes_[leaf];
    if (list.first == kNone) {
        list.first = list.last = leaf;
    } else if (goes_before(list.last, leaf)) {
        node.sooner = list.last;
        list.last = nodes_[list.last].later = leaf;
    } else if (goes_before(leaf, list.first)) {
        node.later = list.first;
        list.first = nodes_[list.first].sooner = leaf;
    } else {
        return false;
    }
    return node.listed = true;
}

void Ranking::unlist(Handle leaf) {
    Node &node = nodes_[leaf];
    List &list = lists_[node.share];
    (node.sooner == kNone ? list.first : nodes_[node.sooner].later) = node.later;
    (node.later == kNone ? list.last : nodes_[node.later].sooner) = node.sooner;
    node.sooner = node.later = kNone;
    node.listed = false;
}

void Ranking::discard(Handle leaf) {
    if (!is_filed(leaf))
        return;
    uint32_t share = nodes_[leaf].share;
    shares_.add_filed(share, -1);
    if (nodes_[leaf].listed) {
        unlist(leaf);
    } else if (policy_ != Policy::user) {
        heaps_[share].discard(leaf);
    } else {
        nodes_[leaf].filed = false;
        user_index(share).attr("discard")(user_leaf(leaf));
    }
}

void Ranking::set_stay(int64_t stay) {
    stay_ = stay;
    // Lists are in the order of the old ranks, in which nothing can be put at an end.
    nodes_.for_each([this](Handle handle) {
        if (!is_filed(handle))
            return;
        if (nodes_[handle].listed)
            unlist(handle);
        heaps_[nodes_[handle].share].put(handle, rank(nodes_[handle]), nodes_[handle].order);
    });
}

Handle Ranking::least() {
    Handle share = shares_ ? shares_.first() : 0;
    if (share == kNone)
        return kNone;
    if (policy_ == Policy::user) {
        try {
            nb::object leaf = user_index(share).attr("least")();
            return leaf.is_none() ? kNone : nb::cast<Handle>(leaf[0]);
        } catch (nb::python_error &error) {
            failed(error);
        }
    }
    Handle listed = lists_[share].first;
    if (listed == kNone || heaps_[share].goes_before(rank(nodes_[listed]), nodes_[listed].order))
        return heaps_[share].least();
    return listed;
}

void Ranking::failed(nb::python_error &error) {
    if (!error.matches(PyExc_Exception))
        throw;
    // Kept for the cache's life, the frames of the traceback would keep their callers' leases alive: keep its text.
    nb::object trace = error.traceback();
    nb::object lines = nb::module_::import_("traceback").attr("format_tb")(trace.is_valid() ? trace : nb::none());
    error.value().attr("add_note")(nb::str("").attr("join")(lines));
    failure_ = error.value().attr("with_traceback")(nb::none());
    merges_ = false;  // what the old policy told apart may be equal now, all over the tree
    policy_ = Policy::lru;
    UserPolicy gone = std::move(user_);
    user_ = UserPolicy{};
    nodes_.for_each([this](Handle handle) {
        if (nodes_[handle].filed)
            heaps_[nodes_[handle].share].put(handle, rank(nodes_[handle]), nodes_[handle].order);
    });
}

bool Ranking::same_otherwise(Handle first, Handle second) {
    if (!merges_)
        return false;
    const Node &one = nodes_[first], &other = nodes_[second];
    if (policy_ != Policy::user) {
        auto counted = [this](const Node &node) { return std::min(node.hit_count, protected_from_); };
        if (policy_ == Policy::slru && counted(one) != counted(other))
            return false;
        return rank(one) == rank(other);
    }
    if (whole_history())
        return one.last_access == other.last_access && one.created == other.created &&
               one.hit_count == other.hit_count && one.priority == other.priority;
    try {
        nb::object one_state = user_.state(stats(one));
        nb::object other_state = user_.state(stats(other));
        nb::object same = nb::steal(PyObject_RichCompare(one_state.ptr(), other_state.ptr(), Py_EQ));
        int truth = same.is_valid() ? PyObject_IsTrue(same.ptr()) : -1;
        if (truth < 0)
            throw nb::python_error();
        return truth != 0;
    } catch (nb::python_error &error) {
        failed(error);
        return false;
    }
}

nb::object Ranking::state(Handle handle) {
    const Node &node = nodes_[handle];
    if (whole_history())
        return nb::make_tuple(node.last_access, node.created, node.hit_count, node.priority);
    if (policy_ == Policy::user) {
        try {
            return user_.state(stats(node));
        } catch (nb::python_error &error) {
            failed(error);
        }
    }
    if (policy_ == Policy::slru)
        return nb::make_tuple(std::min(node.hit_count, protected_from_), node.last_access);
    if (policy_ == Policy::tenure)
        return nb::make_tuple(use_class(node.uses()), node.last_access);
    Rank value = rank(node);
    if (policy_ == Policy::lfu || policy_ == Policy::priority)
        return nb::make_tuple(value.major, value.minor);
    return integer(value.major);
}

int Ranking::traverse(visitproc visit, void *arg) {
    Py_VISIT(user_.policy.ptr());
    Py_VISIT(user_.state.ptr());
    Py_VISIT(user_.indexes.ptr());
    Py_VISIT(failure_.ptr());
    return 0;
}

void Ranking::clear() {
    if (policy_ == Policy::user)
        policy_ = Policy::lru;
    UserPolicy gone = std::move(user_);
    user_ = UserPolicy{};
    nb::object failure = std::move(failure_);
    failure_ = nb::object();
}

}  // namespace aradix
