// The plain case of what a lease does, one call a step: nothing is fenced or marked, no gate is met, there are slots
// enough, and the caller broke no rule. In any other case nothing is changed and the answer is no: the shell then goes the
// long way, by the steps in tree.cpp, and says what is wrong. Both ways come to the same.
#include <algorithm>
#include <stdexcept>

#include "hold.hpp"
#include "tree.hpp"

namespace aradix {

bool Tree::enter_hold(Hold &hold) {
    Step step(*this);
    if (has_marks() || hold.fences() || hold.node_id != 0)
        return false;
    Key key = read_key(hold.key, hold.limit);
    Handle root = find_root(key.name_space);
    if (root == kNone)
        root = new_root(key.name_space);
    Place place = enter(key, root, false);
    if (place.gate != 0)
        return false;
    Handle node = arrive(place);
    lock(node);
    touch(node);
    hold.num_matched = hold.published = hold.committed = items(at(node).depth);
    hold.node_id = at(merge_path(node)).id;
    return true;
}

std::optional<Growth> Tree::grow_hold(Hold &hold, PageTable &table, int64_t num_tokens, int state) {
    Step step(*this);
    int64_t fresh = hold.fresh_slots_for(num_tokens, table.page_size);
    int64_t evicted = 0;
    if (fresh != 0) {
        int64_t missing = fresh - table.free_slots();
        if (has_marks() || hold.fences() || !table.quiet || missing > evictable_tokens)
            return std::nullopt;
        if (missing > 0)
            evicted = evict_into(table, missing, state);
        int64_t *out = hold.extend(fresh);
        if (!table.take_run(out, fresh, state)) {
            // Somebody on another thread was quicker, while an event was told.
            hold.unextend(fresh);
            return Growth{-evicted, evicted, false};
        }
    }
    hold.num_own += num_tokens;
    ++hold.version;
    if (!hold.counted && !hold.resume && hold.num_matched != 0 && hold.node_id != 0)
        count_hit(node_named(hold.node_id));
    return Growth{fresh - evicted, evicted, true};
}

std::optional<Published> Tree::publish_hold(Hold &hold, PageTable &table, nb::handle view, int state) {
    Step step(*this);
    if (has_marks() || hold.fences() || !table.quiet || !hold.store || !hold.counted || hold.node_id == 0)
        return std::nullopt;
    Key key = read_key(view), before = read_key(hold.key);
    size_t size = key.size, known = before.size;
    if (!key.name_space.is(before.name_space) || std::min(size, known) % item_bytes_ != 0 ||
        std::memcmp(key.tokens, before.tokens, std::min(size, known)) != 0)
        return std::nullopt;
    int64_t num_tokens = items(size), start = hold.published;
    if (num_tokens < hold.committed || num_tokens > hold.num_tokens() || items(key.stop) <= start)
        return std::nullopt;
    Handle origin = node_named(hold.node_id);
    if (at(origin).detached || items(at(origin).depth) != start)
        return std::nullopt;
    Place place = descend(key, origin, kPending);
    if (place.gate != 0)
        return std::nullopt;
    Slots own(hold.own_data(), static_cast<size_t>(hold.num_own_slots()));
    nb::object no_ready;
    Grown grown = grow(origin, key, own, key.stop, place, saturated(hold.priority), no_ready);
    if (grown.node != origin) {
        nb::list freed;
        lock(grown.node);
        unlock(origin, freed);
    }
    hold.node_id = at(merge_path(grown.node)).id;
    int64_t held = items(grown.held), end = items(grown.end);
    nb::object duplicates = nb::none();
    if (held > start) {
        auto count = static_cast<size_t>(held - start);
        int64_t *out = nullptr;
        duplicates = new_slots(count, out);
        std::copy(hold.own_data(), hold.own_data() + count, out);
    }
    hold.committed = num_tokens;
    hold.published = end;
    if (size > known)
        hold.key = nb::borrow(view);
    hold.take_front(end - start);
    if (held > start && !table.give(duplicates, state))
        throw std::runtime_error("a lease held slots that its pool does not hold");
    return Published{held, end, records_.ref(hold.node_id, end), duplicates};
}

std::optional<int64_t> Tree::leave_hold(Hold &hold, PageTable &table, int state) {
    Step step(*this);
    if (has_marks() || hold.fences() || !table.quiet || hold.waiting)
        return std::nullopt;
    nb::list freed;
    if (hold.node_id != 0) {
        Handle node = node_named(hold.node_id);
        if (at(node).detached)
            return std::nullopt;
        hold.node_id = 0;
        freed = unpin_node(node, true);
    }
    auto count = static_cast<size_t>(hold.num_own_slots());
    if (count != 0 && !table.give_run(hold.own_data(), count, state))
        throw std::runtime_error("a lease held slots that its pool does not hold");
    hold.drop_all();
    return static_cast<int64_t>(count);
}

nb::object Tree::slots_of_hold(const Hold &hold) {
    Step step(*this);
    auto published = static_cast<size_t>(hold.published), own = static_cast<size_t>(hold.num_own);
    int64_t *out = nullptr;
    nb::object slots = new_slots(published + own, out);
    if (published != 0)
        copy_slots(node_named(hold.node_id), 0, published * item_bytes_, out);
    std::copy(hold.own_data(), hold.own_data() + own, out + published);
    return slots;
}

}  // namespace aradix
