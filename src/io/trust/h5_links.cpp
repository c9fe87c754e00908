// Finds objects of an HDF5 file by path, and lists its datasets. Links are followed here, one at a
// time, so that HDF5 never leaves the file, and dangling links differ from missing ones.

#include <algorithm>

#include "core/error.hpp"
#include "io/h5_support.hpp"
#include "io/trust/reading.hpp"

namespace gyre::h5 {
namespace {

constexpr int max_links = 32;  // per path; more indicate a cycle

/// Components of a path in reverse order, without empty ones and ".": "/a/./b" -> "b", "a".
std::vector<std::string> names_of(const std::string& path) {
  std::vector<std::string> names;
  for (size_t at = 0; at < path.size();) {
    const size_t end = std::min(path.find('/', at), path.size());
    const std::string name = path.substr(at, end - at);
    if (!name.empty() && name != ".") names.insert(names.begin(), name);
    at = end + 1;
  }
  return names;
}

Handle open_object(hid_t group, const std::string& name, const std::string& what) {
  Handle object(H5Oopen(group, name.c_str(), H5P_DEFAULT), H5Oclose);
  detail::check(object.get(), what);
  return object;
}

bool has_link(hid_t object, const std::string& name, const std::string& what) {
  return H5Iget_type(object) == H5I_GROUP &&
         detail::check(H5Lexists(object, name.c_str(), H5P_DEFAULT), what) > 0;
}

std::string value_of(hid_t group, const std::string& name, const H5L_info_t& info,
                     const std::string& what) {
  require_memory("the link of " + what, info.u.val_size, 1);
  std::string value(info.u.val_size + 1, '\0');
  detail::check(H5Lget_val(group, name.c_str(), value.data(), info.u.val_size, H5P_DEFAULT), what);
  return value;
}

/// Throws a usage error for a link that leaves the file.
[[noreturn]] void refuse_foreign_link(const std::string& path, const std::string& file,
                                      const H5L_info_t& info, const std::string& value) {
  const char *target = "", *object = "";
  if (info.type == H5L_TYPE_EXTERNAL)
    H5Lunpack_elink_val(value.data(), info.u.val_size, nullptr, &target, &object);
  H5Eclear2(H5E_DEFAULT);
  throw_usage(
      "'{}' of '{}' is behind a link to another file ('{}', '{}'); copy the object into this one",
      path, file, target, object);
}

}  // namespace

Handle File::find(const std::string& path) const {
  const std::string what = fmt::format("look for '{}' in '{}'", path, path_);
  const Reading scope(what, path_);
  Handle object = open_object(id_.get(), "/", what);
  std::vector<std::string> names = names_of(path);
  std::string link;       // last link followed
  size_t after_link = 0;  // components of `names` left at its target
  int followed = 0;
  while (!names.empty()) {
    const std::string name = names.back();
    if (!has_link(object.get(), name, what)) {
      if (link.empty() || names.size() <= after_link) return {};
      throw_usage("'{}' of '{}' is behind the link {}, which leads to nothing", path, path_, link);
    }
    names.pop_back();
    H5L_info_t info;
    detail::check(H5Lget_info(object.get(), name.c_str(), &info, H5P_DEFAULT), what);
    if (info.type == H5L_TYPE_HARD) {
      object = open_object(object.get(), name, what);
      continue;
    }
    const std::string value = value_of(object.get(), name, info, what);
    if (info.type != H5L_TYPE_SOFT) refuse_foreign_link(path, path_, info, value);
    const std::string target = value.c_str();
    link = fmt::format("'{}' -> '{}'", name, target);
    if (++followed > max_links)
      throw_usage("'{}' of '{}' is behind the link {}, which leads in a circle", path, path_, link);
    after_link = names.size();
    const std::vector<std::string> more = names_of(target);
    names.insert(names.end(), more.begin(), more.end());
    if (target.starts_with('/')) object = open_object(id_.get(), "/", what);
  }
  return object;
}

H5I_type_t File::kind_of(const std::string& path) const {
  const Handle object = find(path);
  return object.valid() ? H5Iget_type(object.get()) : H5I_BADID;
}

std::vector<std::string> File::links_of(const std::string& group) const {
  const std::string what = fmt::format("list '{}' of '{}'", group, path_);
  const Reading scope(what, path_);
  const Handle here = find(group);
  if (!here.valid() || H5Iget_type(here.get()) != H5I_GROUP) return {};
  return detail::names_of_links(here.get(), what);
}

std::vector<std::string> File::attributes_of(const std::string& object) const {
  const std::string what = fmt::format("list the attributes of '{}' of '{}'", object, path_);
  const Reading scope(what, path_);
  const Handle here = find(object);
  if (!here.valid()) return {};
  return detail::names_of_attributes(here.get(), what);
}

bool File::has_group(const std::string& path) const {
  return kind_of(path) == H5I_GROUP;
}
bool File::has_dataset(const std::string& path) const {
  return kind_of(path) == H5I_DATASET;
}
bool File::has_object(const std::string& path) const {
  return kind_of(path) != H5I_BADID;
}

/// `above`: addresses of the groups that lead to `group`, since links may form a cycle.
void File::list_datasets(const std::string& group, const std::string& front,
                         std::vector<haddr_t>& above, std::vector<std::string>& paths) const {
  const std::string what = fmt::format("list '{}' of '{}'", group, path_);
  const Handle here = find(group);
  detail::check(here.get(), what);
  H5O_info_t info;
  detail::check(H5Oget_info2(here.get(), &info, H5O_INFO_BASIC), what);
  if (std::find(above.begin(), above.end(), info.addr) != above.end()) return;
  if (std::ssize(above) == max_group_levels)
    throw_usage("what '{}' of '{}' holds is behind {} groups; at most {} are read", group, path_,
                max_group_levels, max_group_levels - 1);
  above.push_back(info.addr);
  for (const std::string& name : links_of(group)) {
    const H5I_type_t kind = kind_of(group + "/" + name);
    if (kind == H5I_DATASET) paths.push_back(front + name);
    if (kind == H5I_GROUP) list_datasets(group + "/" + name, front + name + "/", above, paths);
  }
  above.pop_back();
}

std::vector<std::string> File::datasets_below(const std::string& group) const {
  const Reading scope("listing " + path_, path_);
  std::vector<haddr_t> above;
  std::vector<std::string> paths;
  list_datasets(group, "", above, paths);
  std::sort(paths.begin(), paths.end());
  return paths;
}

}  // namespace gyre::h5
