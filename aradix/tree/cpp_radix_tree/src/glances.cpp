// What is shown of the tree node by node, to whoever looks at a little of it at a time.
#include "tree.hpp"

namespace aradix {
namespace {

constexpr size_t kShownItems = 8;

}  // namespace

nb::object Tree::roots() {
    Step step(*this);
    nb::list ids;
    for (Handle root : root_list(false))
        append_to(ids, integer(at(root).id));
    return ids;
}

nb::object Tree::glance(int64_t node_id, bool with_children) {
    Step step(*this);
    Handle handle = find_node(node_id);
    if (handle == kNone)
        return nb::none();
    const Node &node = at(handle);
    Handle root = handle;
    while (at(root).parent != kNone)
        root = at(root).parent;
    nb::list children;
    for (Handle child = node.first_child; child != kNone && with_children; child = at(child).next)
        append_to(children, integer(at(child).id));
    return records_.make(
        records_.glance, integer(node.id), integer(node.parent == kNone ? 0 : at(node.parent).id),
        at(root).root->name_space, integer(items(node.depth)), integer(num_tokens(node)),
        bytes_of(node.tokens.data(), std::min(node.tokens.size(), kShownItems * item_bytes_)), integer(node.lock_ref),
        records_.gates[node.gate], records_.no_latch, records_.on_device, nb::bool_(node.detached),
        integer(node.hit_count), integer(node.priority), integer(node.last_access), integer(node.created), children);
}

nb::object Tree::look(nb::handle key_object) {
    Step step(*this);
    Key key = read_key(key_object);
    nb::list path;
    Handle root = find_root(key.name_space);
    if (root == kNone)
        return path;
    Place place = descend(key, root, kNothingStops);
    std::vector<int64_t> ids;
    if (place.child != kNone && place.size > 0)
        ids.push_back(at(place.child).id);
    for (Handle handle = place.node; handle != kNone; handle = at(handle).parent)
        ids.push_back(at(handle).id);
    for (auto id = ids.rbegin(); id != ids.rend(); ++id)
        append_to(path, integer(*id));
    return path;
}

int64_t Tree::next_victim() {
    Step step(*this);
    Handle leaf = ranking_.least();
    return leaf == kNone ? 0 : at(leaf).id;
}

}  // namespace aradix
