//! The paths that a key reads of a document, in the trees that a format and the scanner follow.

use super::path::Node;

/// The paths of a specification. The position of a path is its target.
#[derive(Clone, Debug, Default)]
pub(super) struct PathList {
    names: Vec<Vec<String>>,
    /// The targets of which some place takes the default.
    with_default: Vec<usize>,
}

impl PathList {
    /// The target of a path. Places that share a path have one target.
    pub(super) fn target(&mut self, names: Vec<String>, takes_default: bool) -> usize {
        let known = self.names.iter().position(|known| *known == names);
        let target = known.unwrap_or_else(|| {
            self.names.push(names);
            self.names.len() - 1
        });
        if takes_default && !self.with_default.contains(&target) {
            self.with_default.push(target);
        }
        target
    }

    pub(super) fn compile(self) -> PathTrees {
        let all: Vec<usize> = (0..self.names.len()).collect();
        PathTrees {
            tree: self.tree(&all),
            targets: self.names.len(),
            layers: self.layers(&all),
            default_layers: self.layers(&self.with_default),
            with_default: self.with_default,
        }
    }

    fn tree(&self, targets: &[usize]) -> Node {
        let paths = targets
            .iter()
            .filter_map(|target| Some((*target, self.names.get(*target)?.as_slice())));
        Node::of_targets(paths)
    }

    /// Splits paths into trees in which none leads into another one: a path goes behind all that
    /// lead to it.
    fn layers(&self, targets: &[usize]) -> Vec<Node> {
        let mut layers: Vec<Vec<usize>> = Vec::new();
        for target in targets {
            let Some(path) = self.names.get(*target) else {
                continue;
            };
            let before = targets
                .iter()
                .filter_map(|other| self.names.get(*other))
                .filter(|other| other.len() < path.len() && path.starts_with(other))
                .count();
            if layers.len() <= before {
                layers.resize_with(before + 1, Vec::new);
            }
            if let Some(layer) = layers.get_mut(before) {
                layer.push(*target);
            }
        }
        layers.iter().map(|layer| self.tree(layer)).collect()
    }
}

/// The trees of all paths of a specification.
#[derive(Clone, Debug, Default)]
pub(super) struct PathTrees {
    /// All paths, for a document that is there before the key: JSON.
    pub(super) tree: Node,
    pub(super) targets: usize,
    /// The paths for a document that a format writes. It writes a value that is wanted as a whole
    /// with the document's own names, and without defaults. So a path into such a value, which may
    /// use another name, is read from a document of its own.
    pub(super) layers: Vec<Node>,
    /// The same for the paths of which a place takes the default.
    pub(super) default_layers: Vec<Node>,
    pub(super) with_default: Vec<usize>,
}

#[cfg(test)]
mod tests {
    use super::PathList;

    #[test]
    fn no_path_of_a_layer_leads_into_another_one() {
        let mut paths = PathList::default();
        for path in ["a", "a.b", "a.b.c", "a.x", "d.e", "d", "f.g"] {
            paths.target(path.split('.').map(str::to_owned).collect(), path == "d.e");
        }
        let trees = paths.compile();
        assert_eq!(trees.targets, 7);
        assert_eq!(trees.layers.len(), 3);
        assert_eq!(trees.default_layers.len(), 1);
        let [first, second, third] = trees.layers.as_slice() else {
            panic!("there are three");
        };
        assert_eq!(first.member(b"a").unwrap().target, Some(0));
        assert!(first.member(b"a").unwrap().member(b"b").is_none());
        assert_eq!(
            first.member(b"f").unwrap().member(b"g").unwrap().target,
            Some(6)
        );
        assert_eq!(second.member(b"a").unwrap().target, None);
        assert_eq!(
            second.member(b"d").unwrap().member(b"e").unwrap().target,
            Some(4)
        );
        assert!(third.member(b"d").is_none());
    }
}
