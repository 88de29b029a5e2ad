#include "tree.hpp"

#include <algorithm>
#include <stdexcept>

#include "unlocked.hpp"

namespace aradix {
namespace {


void check_count(const Slots &slots, size_t needed) {
    if (slots.size < needed)
        throw nb::value_error("fewer slots than tokens");
}

// As long as this a compare takes longer than the 5 ms for which a Python thread may keep the GIL from others.
constexpr size_t kLongCompare = size_t{1} << 25;

// Lets go of the GIL while it compares, if that takes long. Nothing moves meanwhile: the step under way keeps everybody
// out of the tree, and the key holds its bytes. What others may have changed by then is asked again by who relies on it.
size_t difference_without_gil(const uint8_t *first, const uint8_t *second, size_t size) {
    if (size < kLongCompare)
        return first_difference(first, second, size);
    Unlocked others_run;
    return first_difference(first, second, size);
}

}  // namespace

// ---- walking ----

nb::object Tree::match(nb::handle key_object, std::optional<int64_t> limit, bool pin, bool past_pending) {
    Step step(*this);
    Key key = read_key(key_object, limit);
    Handle root = find_root(key.name_space);
    if (root == kNone) {
        if (!pin)
            return records_.no_match;
        root = new_root(key.name_space);
    }
    Place place = enter(key, root, past_pending);
    if (place.gate != 0)
        return records_.make(records_.match, integer(0), integer(0), records_.nowhere, integer(place.gate),
                             records_.nothing, integer(0), records_.nowhere, integer(0));
    Handle node = arrive(place);
    if (pin)
        lock(node);
    nb::object ready = touch(node).ready;
    int64_t matched = items(at(node).depth);
    int64_t node_id = at(merge_path(node)).id;
    nb::object last = records_.ref(node_id, matched);
    return records_.make(records_.match, integer(matched), integer(node_id), last, integer(0), ready_or_nothing(ready),
                         integer(0), last, integer(0));
}

int64_t Tree::peek(nb::handle key_object) {
    Step step(*this);
    Key key = read_key(key_object);
    Handle root = find_root(key.name_space);
    if (root == kNone)
        return 0;
    Place place = descend(key, root, kNothingStops);
    return items(at(place.node).depth + place.size);
}

Tree::Place Tree::enter(const Key &key, Handle root, bool past_pending) {
    int stopped_by = past_pending ? kGranted : kPending;
    if (at(root).gate >= stopped_by)
        return Place{root, kNone, 0, at(root).id};
    return descend(key, root, stopped_by);
}

Tree::Place Tree::descend(const Key &key, Handle from, int stopped_by) {
    Handle handle = from;
    size_t depth = at(from).depth;
    while (key.stop >= depth + page_bytes_) {
        Handle child = find_child(handle, key.tokens + depth);
        if (child == kNone)
            break;
        const Node &node = at(child);
        if (node.gate >= stopped_by)
            return Place{handle, kNone, 0, node.id};
        fetch_below(node);
        size_t size = std::min(node.tokens.size(), key.stop - depth);
        size_t same = difference_without_gil(node.tokens.data(), key.tokens + depth, size);
        if (same < node.tokens.size())
            return Place{handle, child, same / page_bytes_ * page_bytes_};
        handle = child;
        depth = node.depth;
    }
    return Place{handle};
}

// ---- growing ----

nb::object Tree::insert(nb::handle key_object, nb::handle slots_object, nb::handle priority_object,
                        nb::handle ready_object, bool past_pending, int64_t held_hits, int64_t new_hits) {
    Step step(*this);
    Key key = read_key(key_object);
    Slots slots(slots_object);
    int64_t priority = saturated(priority_object);
    nb::object ready = records_.checked_ready(ready_object);
    check_count(slots, count_of(key.stop));
    Handle root = find_root(key.name_space);
    if (root == kNone)
        root = new_root(key.name_space);
    Place place = enter(key, root, past_pending);
    if (place.gate != 0)
        return integer(place.gate);
    Grown grown = grow(root, key, fresh_run(slots, 0, key.stop, place), key.stop, place, priority, ready, held_hits,
                       new_hits);
    int64_t node_id = at(merge_path(grown.node)).id;
    prune(root);
    int64_t end = items(grown.end);
    return records_.make(records_.inserted, integer(items(grown.held)), integer(end), grown.existing,
                         records_.ref(node_id, end), integer(0), ready_or_nothing(grown.ready));
}

nb::object Tree::extend(int64_t node_id, nb::handle key_object, nb::handle slots_object, nb::handle priority_object,
                        nb::handle ready_object) {
    Step step(*this);
    Handle origin = node_named(node_id);
    if (at(origin).detached)
        return nb::none();
    Key key = read_key(key_object);
    Slots slots(slots_object);
    int64_t priority = saturated(priority_object);
    nb::object ready = records_.checked_ready(ready_object);
    size_t stop = std::max(key.stop, at(origin).depth);
    check_count(slots, count_of(stop - at(origin).depth));
    Place place = descend(key, origin, kPending);
    if (place.gate != 0)
        stop = at(place.node).depth;
    Grown grown = grow(origin, key, fresh_run(slots, at(origin).depth, stop, place), stop, place, priority, ready);
    if (grown.node != origin) {
        lock(grown.node, origin);
    }
    node_id = at(merge_path(grown.node, grown.from)).id;
    int64_t end = items(grown.end);
    return records_.make(records_.inserted, integer(items(grown.held)), integer(end), grown.existing,
                         records_.ref(node_id, end), integer(node_id), ready_or_nothing(grown.ready));
}

SlotRun Tree::fresh_run(const Slots &slots, size_t start, size_t stop, const Place &place) const {
    size_t held = depth_of(place);
    if (held >= stop)
        return SlotRun();
    return SlotRun(slots.data + count_of(held - start), count_of(stop - held), page_size_);
}

// Add what is missing of a key below where its walk from `origin` ended.
Tree::Grown Tree::grow(Handle origin, const Key &key, SlotRun fresh, size_t stop, const Place &place, int64_t priority,
                       const nb::object &ready, int64_t held_hits, int64_t new_hits) {
    Handle node = arrive(place);
    Grown grown{node, at(node).depth, at(node).depth, nb::object(), nb::object(), 0};
    for (Handle walked = node; walked != origin; walked = at(walked).parent) {
        count_hits(walked, held_hits);
        grown.ready = records_.newest_ready(grown.ready, at(walked).ready);
    }
    size_t start = at(origin).depth;
    grown.existing = slots_between(node, start, grown.held);
    if (grown.held < stop) {
        grown.node = new_leaf(node, key.tokens + grown.held, stop - grown.held, std::move(fresh));
        grown.end = stop;
        Node &leaf = at(grown.node);
        leaf.ready = ready;
        leaf.priority = priority;
        leaf.hit_count = new_hits;
        note_marks(ready);
        recall(grown.node, key.tokens + grown.held);
    }
    raise_priorities(node, priority);
    grown.from = std::min(touch(grown.node).from, start);
    return grown;
}

// ---- pins ----

int64_t Tree::pin(nb::handle ref) {
    Step step(*this);
    At found = node_at(ref);
    if (found.node == kNone)
        return 0;
    const Node &node = at(found.node);
    Handle pinned = found.depth < node.depth ? split(found.node, found.depth - node.begin()) : found.node;
    lock(pinned);
    return at(pinned).id;
}

nb::object Tree::unpin(int64_t node_id, bool touched) {
    Step step(*this);
    return node_id == 0 ? nb::list() : unpin_node(node_named(node_id), touched);
}

nb::list Tree::unpin_node(Handle handle, bool touched) {
    nb::list freed;
    // A root has no path to merge, and may be gone once it is unpinned.
    bool merges = !at(handle).detached && at(handle).parent != kNone;
    size_t from = 0;
    if (touched)
        from = touch_and_unlock(handle, freed);
    else
        unlock(handle, freed);
    if (merges)
        merge_path(handle, from);
    return freed;
}

Tree::At Tree::node_at(nb::handle ref) {
    int64_t node_id = nb::cast<int64_t>(ref.attr(records_.name_node_id));
    if (node_id == 0)
        return At{kNone, 0};
    int64_t depth = nb::cast<int64_t>(ref.attr(records_.name_depth));
    Handle handle = node_named(node_id);
    const Node &node = at(handle);
    if (depth < items(node.begin()) || depth > items(node.depth) ||
        (depth < items(node.depth) && static_cast<size_t>(depth) % page_size_ != 0)) {
        PyErr_SetObject(PyExc_KeyError, ref.ptr());
        throw nb::python_error();
    }
    if (depth == items(node.begin()) && node.parent != kNone)
        return At{node.parent, at(node.parent).depth};
    return At{handle, static_cast<size_t>(depth) * item_bytes_};
}

// ---- what is said of a path ----

void Tree::record_hit(int64_t node_id) {
    Step step(*this);
    count_hit(node_named(node_id));
}

void Tree::count_hit(Handle bottom) {
    size_t from = reuse_ ? SIZE_MAX : 0;
    for (Handle handle = bottom; handle != kNone; handle = at(handle).parent) {
        uint8_t before = at(handle).of_uses;
        count_hits(handle, 1);
        if (at(handle).of_uses != before)
            from = at(handle).begin();
    }
    if (!at(bottom).detached) {
        refile(bottom);
        merge_path(bottom, from);
    }
}

void Tree::mark_streams(int64_t node_id, nb::handle streams_object) {
    Step step(*this);
    Handle bottom = node_named(node_id);
    nb::object streams = checked_streams(streams_object);
    note_marks(streams);
    for (Handle handle = bottom; handle != kNone; handle = at(handle).parent)
        at(handle).streams = joined_streams(at(handle).streams, streams);
}

// ---- shrinking ----

nb::object Tree::detach(nb::handle name_space) {
    Step step(*this);
    std::vector<Handle> roots, found, gone;
    if (name_space.is_none()) {
        roots = root_list(false);
    } else if (Handle root = find_root(nb::borrow(name_space)); root != kNone) {
        roots.push_back(root);
    }
    for (Handle root : roots)
        preorder(root, found);
    nb::list freed;
    int64_t num_freed = 0, num_held = 0;
    for (Handle handle : found) {
        Node &node = at(handle);
        if (node.parent == kNone) {
            remove_root(handle, node.lock_ref != 0);
        } else {
            --num_nodes;
            if (reuse_)
                reuse_->drop(node);
            ranking_.discard(handle);
            untime(handle);
            if (!name_space.is_none())
                record_removed(node.pages);
        }
        node.detached = true;
        if (node.lock_ref != 0) {
            num_held += num_tokens(node);
            continue;
        }
        gone.push_back(handle);
        if (node.parent != kNone) {
            num_freed += num_tokens(node);
            shares_.add_cached(node.share, -num_tokens(node));
            append_to(freed, freed_record(slots_copy(node, 0), node.streams));
        }
    }
    // Children first: where a whole subtree goes, each still finds its parent.
    for (auto handle = gone.rbegin(); handle != gone.rend(); ++handle) {
        if (at(*handle).parent != kNone)
            unlink(*handle);
        forget(*handle);
    }
    evictable_tokens -= num_freed;
    protected_tokens -= num_held;
    detached_tokens += num_held;
    if (name_space.is_none())
        record_cleared();
    return records_.make(records_.detached, freed, integer(num_freed), integer(num_held));
}

// ---- gates ----

nb::object Tree::close_gate(nb::handle key_object) {
    Step step(*this);
    Key key = read_key(key_object);
    Handle root = find_root(key.name_space);
    if (root == kNone)
        root = new_root(key.name_space);
    Place place{root};
    if (at(root).gate == kOpen)
        place = descend(key, root, kNothingStops);
    for (Handle above = place.child != kNone ? place.child : place.node; above != kNone; above = at(above).parent)
        if (at(above).gate != kOpen)
            return records_.make(records_.closed, integer(at(above).id), integer(0), nb::bool_(true));
    Handle node = arrive(place);
    at(node).gate = kPending;
    lock(node);
    return records_.make(records_.closed, integer(at(node).id), integer(items(at(node).depth)), nb::bool_(false));
}

void Tree::set_gate(int64_t node_id, int gate) {
    Step step(*this);
    if (gate < kOpen || gate > kGranted)
        throw nb::value_error("no such gate");
    at(node_named(node_id)).gate = static_cast<uint8_t>(gate);
}

nb::object Tree::open_gate(int64_t node_id) {
    Step step(*this);
    Handle handle = node_named(node_id);
    at(handle).gate = kOpen;
    return unpin_node(handle, false);
}

nb::object Tree::pin_below(int64_t node_id) {
    Step step(*this);
    std::vector<Handle> found;
    preorder(node_named(node_id), found);
    nb::list pinned;
    for (Handle handle : found) {
        if (at(handle).num_children == 0) {
            lock(handle);
            append_to(pinned, integer(at(handle).id));
        }
    }
    return pinned;
}

nb::object Tree::evict_below(int64_t node_id) {
    Step step(*this);
    std::vector<Handle> found;
    preorder(node_named(node_id), found);
    nb::list freed;
    for (size_t index = found.size(); index-- > 1;) {
        Node &leaf = at(found[index]);
        append_to(freed, freed_record(slots_copy(leaf, 0), leaf.streams));
        if (shares_)
            shares_.at(leaf.share).evicted += num_tokens(leaf);
        record_removed(std::move(leaf.pages));
        remove_leaf(found[index], false);
    }
    return freed;
}

// ---- looking ----

nb::object Tree::slots_of(nb::handle ref, int64_t start) {
    Step step(*this);
    At found = node_at(ref);
    if (found.node == kNone)
        return records_.no_slots;
    size_t first = start <= 0 ? 0 : std::min(static_cast<size_t>(start), count_of(found.depth));
    return slots_between(found.node, first * item_bytes_, found.depth);
}

nb::object Tree::slots_between(Handle node, size_t start, size_t stop) {
    if (start >= stop)
        return records_.no_slots;
    int64_t *out = nullptr;
    nb::object array = new_slots(count_of(stop - start), out);
    copy_slots(node, start, stop, out);
    return array;
}

void Tree::copy_slots(Handle node, size_t start, size_t stop, int64_t *out) {
    for (Handle handle = node; handle != kNone && at(handle).depth > start; handle = at(handle).parent) {
        const Node &part = at(handle);
        size_t from = std::max(start, part.begin()), to = std::min(stop, part.depth);
        if (from < to)
            part.slots.copy_to(out + count_of(from - start), count_of(from - part.begin()),
                               count_of(to - from), page_size_);
    }
}

bool Tree::is_detached(int64_t node_id) {
    Step step(*this);
    return node_id != 0 && at(node_named(node_id)).detached;
}

int64_t Tree::lock_ref(int64_t node_id) {
    Step step(*this);
    return at(node_named(node_id)).lock_ref;
}

bool Tree::is_below(int64_t node_id, int64_t ancestor_id) {
    Step step(*this);
    for (Handle handle = find_node(node_id); handle != kNone; handle = at(handle).parent)
        if (at(handle).id == ancestor_id)
            return true;
    return false;
}

nb::object Tree::namespaces() {
    Step step(*this);
    nb::list found;
    for (Handle root : root_list(false))
        append_to(found, at(root).root->name_space);
    return found;
}

nb::object Tree::view(int64_t node_id) {
    Step step(*this);
    Handle handle = node_named(node_id), root = handle;
    while (at(root).parent != kNone)
        root = at(root).parent;
    return shown(handle, at(root).root->name_space);
}

nb::object Tree::child_ids(int64_t node_id) {
    Step step(*this);
    nb::list ids;
    Handle child = node_id == 0 ? first_root() : at(node_named(node_id)).first_child;
    for (; child != kNone; child = at(child).next)
        append_to(ids, integer(at(child).id));
    return ids;
}

nb::object Tree::walk(bool detached) {
    Step step(*this);
    nb::list views;
    for (Handle root : root_list(detached)) {
        nb::object name_space = at(root).root->name_space;
        std::vector<Handle> found;
        preorder(root, found);
        for (Handle handle : found)
            append_to(views, shown(handle, name_space));
    }
    return nb::iter(views);
}

nb::object Tree::shown(Handle handle, const nb::object &name_space) {
    const Node &node = at(handle);
    return records_.make(
        records_.node_view, integer(node.id), integer(node.parent == kNone ? 0 : at(node.parent).id), name_space,
        integer(items(node.depth)), integer(num_tokens(node)), bytes_of(node.tokens.data(), node.tokens.size()),
        slots_copy(node, 0), integer(node.lock_ref), records_.gates[node.gate], nb::bool_(node.detached),
        integer(node.hit_count), integer(node.priority), integer(node.last_access), integer(node.created),
        integer(node.num_children), nb::bool_(ranking_.is_filed(handle)), ranking_.state(handle),
        records_events_ && node.parent != kNone ? digest_list(node.pages) : nb::none(),
        nb::none(), integer(0), records_.no_latch, nb::bool_(false),
        node.timed ? nb::object(nb::make_tuple(timed_.of(handle).expires, timed_.of(handle).after)) : nb::none());
}

}  // namespace aradix
