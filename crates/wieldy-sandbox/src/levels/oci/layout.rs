//! OCI image layouts on disk: selects the image for this machine, verifies the digests of its parts, and unpacks it.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use ring::digest::{Context, SHA256, SHA512};
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// Maximum size of an index, a manifest or a configuration.
const JSON_BYTES_MAX: u64 = 4 << 20;

/// Maximum nesting of indexes: one may name others, for several images and several architectures.
const DEPTH_MAX: usize = 4;

/// An image layout.
struct Layout<'a> {
    folder: &'a Path,
}

/// A reference to a part of a layout.
#[derive(Debug, Clone, Deserialize)]
struct Descriptor {
    digest: String,
    size: Option<u64>,
    platform: Option<Platform>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Platform {
    os: String,
    architecture: String,
}

/// An index or a manifest, distinguished by their fields.
#[derive(Debug, Deserialize)]
struct Listing {
    manifests: Option<Vec<Descriptor>>,
    config: Option<Descriptor>,
    layers: Option<Vec<Descriptor>>,
}

/// The image that is unpacked: the digest of its manifest, and its layers, lowest first.
#[derive(Debug)]
struct Image {
    digest: String,
    layers: Vec<Descriptor>,
}

/// Unpacks the image of a layout for this machine below `state`, once. Returns its folder.
///
/// An image is identified by its manifest, which names all its parts. The machine's `tar` unpacks each layer into an
/// empty folder of its own, where a link of one layer cannot redirect a file of the next. The layers are then merged
/// without following any link.
pub(super) fn unpack(folder: &Path, state: &Path) -> io::Result<PathBuf> {
    let layout = Layout { folder };
    let image = layout.image()?;
    let (name, images) = (image.digest.replace(':', "-"), state.join("images"));
    let place = images.join(&name);
    if place.is_dir() {
        return Ok(place);
    }
    fs::create_dir_all(&images)?;
    let work = images.join(format!("{name}.{}", std::process::id()));
    let _ = fs::remove_dir_all(&work);
    let unpacked = layout.unpack_into(&image, &work);
    let placed = unpacked.and_then(|whole| fs::rename(&whole, &place));
    fs::remove_dir_all(&work)?;
    match placed {
        // Another executor has unpacked it meanwhile.
        Err(_) if place.is_dir() => Ok(place),
        placed => placed.map(|()| place),
    }
}

/// Returns the platform of this machine, in the terms of OCI images.
fn of_this_machine() -> Platform {
    let architecture = match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    };
    Platform { os: "linux".into(), architecture: architecture.into() }
}

impl Layout<'_> {
    /// Returns the first image for this machine.
    fn image(&self) -> io::Result<Image> {
        if !self.folder.join("oci-layout").is_file() {
            return Err(self.invalid("it has no file `oci-layout`"));
        }
        let index = self.folder.join("index.json");
        let index = fs::read(&index).map_err(|error| self.invalid(&format!("its `index.json`: {error}")))?;
        let index: Listing = self.parsed("its `index.json`", &index)?;
        let mut others = Vec::new();
        let manifests = index.manifests.ok_or_else(|| self.invalid("its `index.json` lists no `manifests`"))?;
        if let Some(image) = self.first_of(&manifests, DEPTH_MAX, &mut others)? {
            return Ok(image);
        }
        others.dedup();
        let Platform { os, architecture } = of_this_machine();
        let wanted = format!("{os}/{architecture}");
        Err(self.invalid(&match others.is_empty() {
            true => "its indexes lead to no image".to_owned(),
            false => format!("it has no image for {wanted}, only for {}", others.join(", ")),
        }))
    }

    /// Returns the first image for this machine among these. Adds the platforms of the others to `others`.
    fn first_of(&self, listed: &[Descriptor], depth: usize, others: &mut Vec<String>) -> io::Result<Option<Image>> {
        for one in listed {
            if let Some(platform) = one.platform.as_ref().filter(|platform| **platform != of_this_machine()) {
                others.push(format!("{}/{}", platform.os, platform.architecture));
                continue;
            }
            let listing: Listing = self.read(one)?;
            let found = match listing {
                Listing { manifests: Some(inner), .. } if depth > 0 => self.first_of(&inner, depth - 1, others)?,
                Listing { layers: Some(layers), config: Some(config), .. } => {
                    self.is_for_this_machine(&config, others)?.then(|| Image { digest: one.digest.clone(), layers })
                }
                Listing { manifests: Some(_), .. } => return Err(self.invalid("its indexes are nested too deeply")),
                _ => return Err(self.invalid(&format!("`{}` is neither an index nor a manifest", one.digest))),
            };
            match found {
                Some(image) if image.layers.is_empty() => {
                    return Err(self.invalid(&format!("the manifest `{}` names no layer", image.digest)));
                }
                Some(image) => return Ok(Some(image)),
                None => {}
            }
        }
        Ok(None)
    }

    /// Returns true if the image with this configuration is for this machine. Adds another platform to `others`.
    fn is_for_this_machine(&self, config: &Descriptor, others: &mut Vec<String>) -> io::Result<bool> {
        let platform: Platform = self.read(config)?;
        let is_ours = platform == of_this_machine();
        if !is_ours {
            others.push(format!("{}/{}", platform.os, platform.architecture));
        }
        Ok(is_ours)
    }

    /// Merges all layers in a folder below `work`, which it makes.
    fn unpack_into(&self, image: &Image, work: &Path) -> io::Result<PathBuf> {
        let whole = work.join("whole");
        fs::create_dir_all(&whole)?;
        for (number, layer) in image.layers.iter().enumerate() {
            let single = work.join(number.to_string());
            fs::create_dir(&single)?;
            let (mut blob, path) = self.open(layer)?;
            self.check(layer, &mut blob, io::sink())?;
            take_apart(&path, &single)?;
            lay_over(&single, &whole)?;
        }
        Ok(whole)
    }

    /// Reads, verifies and parses a small blob.
    fn read<T: DeserializeOwned>(&self, descriptor: &Descriptor) -> io::Result<T> {
        let (blob, _) = self.open(descriptor)?;
        if blob.metadata()?.len() > JSON_BYTES_MAX {
            return Err(self
                .invalid(&format!("the blob `{}` is too large for an index, manifest or config", descriptor.digest)));
        }
        let mut bytes = Vec::new();
        self.check(descriptor, &mut blob.take(JSON_BYTES_MAX), &mut bytes)?;
        self.parsed(&format!("the blob `{}`", descriptor.digest), &bytes)
    }

    fn parsed<T: DeserializeOwned>(&self, what: &str, bytes: &[u8]) -> io::Result<T> {
        serde_json::from_slice(bytes).map_err(|error| self.invalid(&format!("{what}: {error}")))
    }

    fn open(&self, descriptor: &Descriptor) -> io::Result<(File, PathBuf)> {
        let digest = &descriptor.digest;
        let is_plain = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_alphanumeric());
        let (kind, hash) = match digest.split_once(':') {
            Some((kind, hash)) if is_plain(kind) && is_plain(hash) => (kind, hash),
            _ => return Err(self.invalid(&format!("`{digest}` is no digest"))),
        };
        let path = self.folder.join("blobs").join(kind).join(hash);
        let blob = File::open(&path).map_err(|error| self.invalid(&format!("the blob `{digest}`: {error}")))?;
        Ok((blob, path))
    }

    /// Copies a blob to `to`, and fails if its digest or its size is wrong.
    fn check(&self, descriptor: &Descriptor, blob: &mut dyn Read, mut to: impl io::Write) -> io::Result<()> {
        let digest = &descriptor.digest;
        let kind = digest.split(':').next().unwrap_or_default();
        let mut context = match kind {
            "sha256" => Context::new(&SHA256),
            "sha512" => Context::new(&SHA512),
            _ => return Err(self.invalid(&format!("`{digest}` is neither a sha256 nor a sha512"))),
        };
        let (mut part, mut length) = (vec![0; 64 << 10], 0_u64);
        loop {
            let count = blob.read(&mut part)?;
            let Some(bytes) = part.get(..count).filter(|bytes| !bytes.is_empty()) else { break };
            context.update(bytes);
            to.write_all(bytes)?;
            length += count as u64;
        }
        let hash: String = context.finish().as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
        if *digest != format!("{kind}:{hash}") || descriptor.size.is_some_and(|size| size != length) {
            return Err(self.invalid(&format!("the blob `{digest}` is damaged: it does not match its digest")));
        }
        Ok(())
    }

    fn invalid(&self, problem: &str) -> io::Error {
        let told = format!("the OCI image layout `{}` cannot be used: {problem}", self.folder.display());
        io::Error::new(io::ErrorKind::InvalidData, told)
    }
}

fn take_apart(layer: &Path, folder: &Path) -> io::Result<()> {
    let mut tar = std::process::Command::new("tar");
    tar.args(["--extract", "--numeric-owner", "--exclude=dev/*", "--file"]).arg(layer).arg("--directory").arg(folder);
    let output = tar.env_clear().env("PATH", "/usr/bin:/bin").stdin(std::process::Stdio::null()).output()?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    Err(io::Error::other(format!("`tar` could not unpack the layer `{}`: {said}", layer.display())))
}

/// Moves the entries of `upper` to `lower`, and removes entries that its whiteout files name.
fn lay_over(upper: &Path, lower: &Path) -> io::Result<()> {
    let is_folder = |path: &Path| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir());
    let remove = |path: &Path| match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(_) => Ok(()),
    };
    let mut entries: Vec<_> = fs::read_dir(upper)?.collect::<Result<Vec<_>, _>>()?;
    // Whiteout files first: the same layer may put another file in the place of the removed one.
    entries.sort_by_key(|entry| !entry.file_name().to_string_lossy().starts_with(".wh."));
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name == ".wh..wh..opq" {
            fs::read_dir(lower)?.flatten().try_for_each(|inner| remove(&inner.path()))?;
        } else if let Some(gone) = name.strip_prefix(".wh.") {
            remove(&lower.join(gone))?;
        } else {
            let target = lower.join(entry.file_name());
            if is_folder(&entry.path()) && is_folder(&target) {
                fs::set_permissions(&target, entry.metadata()?.permissions())?;
                lay_over(&entry.path(), &target)?;
            } else {
                remove(&target)?;
                fs::rename(entry.path(), target)?;
            }
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A layout that a test fills.
    struct World {
        folder: tempfile::TempDir,
        state: tempfile::TempDir,
    }

    impl World {
        fn new() -> Self {
            let folder = tempfile::tempdir().unwrap();
            fs::create_dir_all(folder.path().join("blobs/sha256")).unwrap();
            fs::write(folder.path().join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
            Self { folder, state: tempfile::tempdir().unwrap() }
        }

        fn blob(&self, digest: &Value) -> PathBuf {
            let hash = digest["digest"].as_str().unwrap().strip_prefix("sha256:").unwrap();
            self.folder.path().join("blobs/sha256").join(hash)
        }

        fn put(&self, bytes: &[u8]) -> Value {
            let hash = ring::digest::digest(&SHA256, bytes);
            let hash: String = hash.as_ref().iter().map(|byte| format!("{byte:02x}")).collect();
            let descriptor = json!({"digest": format!("sha256:{hash}"), "size": bytes.len()});
            fs::write(self.blob(&descriptor), bytes).unwrap();
            descriptor
        }

        fn put_json(&self, value: &Value) -> Value {
            self.put(value.to_string().as_bytes())
        }

        /// Adds a layer of files, each with its content.
        fn layer(&self, files: &[(&str, &str)]) -> Value {
            let folder = tempfile::tempdir().unwrap();
            for (name, content) in files {
                fs::write(folder.path().join(name), content).unwrap();
            }
            let mut tar = std::process::Command::new("tar");
            let tar = tar.args(["--create", "--gzip", "--file", "-", "--directory"]).arg(folder.path()).arg(".");
            self.put(&tar.output().unwrap().stdout)
        }

        fn image(&self, architecture: &str, layers: &[&Value]) -> Value {
            let config = self.put_json(&json!({"os": "linux", "architecture": architecture}));
            self.put_json(&json!({"schemaVersion": 2, "config": config, "layers": layers}))
        }

        fn index(&self, manifests: &[&Value]) {
            fs::write(self.folder.path().join("index.json"), json!({"manifests": manifests}).to_string()).unwrap();
        }

        /// Returns the files of the image with their contents, or the error.
        fn unpack(&self) -> Result<Vec<(String, String)>, String> {
            let image = unpack(self.folder.path(), self.state.path()).map_err(|error| {
                let text = error.to_string();
                text.replace(&self.folder.path().display().to_string(), "LAYOUT")
            })?;
            let files = fs::read_dir(image).unwrap().map(Result::unwrap);
            let mut files: Vec<_> = files
                .map(|file| (file.file_name().into_string().unwrap(), fs::read_to_string(file.path()).unwrap()))
                .collect();
            files.sort();
            Ok(files)
        }
    }

    fn files(files: &[(&str, &str)]) -> Result<Vec<(String, String)>, String> {
        Ok(files.iter().map(|(name, content)| ((*name).to_owned(), (*content).to_owned())).collect())
    }

    fn ours() -> String {
        of_this_machine().architecture
    }

    fn cannot(problem: &str) -> Result<Vec<(String, String)>, String> {
        Err(format!("the OCI image layout `LAYOUT` cannot be used: {problem}"))
    }

    #[test]
    fn images_with_the_same_top_layer_are_two_images() {
        let world = World::new();
        let top = world.layer(&[("top", "t"), (".wh.gone", "")]);
        let (one, other) = (world.layer(&[("below", "1"), ("gone", "")]), world.layer(&[("below", "2")]));
        world.index(&[&world.image(&ours(), &[&one, &top])]);
        assert_eq!(world.unpack(), files(&[("below", "1"), ("top", "t")]));
        world.index(&[&world.image(&ours(), &[&other, &top])]);
        assert_eq!(world.unpack(), files(&[("below", "2"), ("top", "t")]));
    }

    #[test]
    fn of_several_images_the_first_for_this_machine_is_taken() {
        let world = World::new();
        let (first, second, third) =
            (world.layer(&[("is", "another's")]), world.layer(&[("is", "ours")]), world.layer(&[("is", "later")]));
        let mut said = world.image("s390x", &[&first]);
        said["platform"] = json!({"os": "linux", "architecture": "s390x"});
        let unsaid = world.image("mips", &[&first]);
        let nested = world.put_json(&json!({"manifests": [said, unsaid, world.image(&ours(), &[&second])]}));
        world.index(&[&said, &nested, &world.image(&ours(), &[&third])]);
        assert_eq!(world.unpack(), files(&[("is", "ours")]));
        world.index(&[&said, &unsaid]);
        let wanted = format!("it has no image for linux/{}, only for linux/s390x, linux/mips", ours());
        assert_eq!(world.unpack(), cannot(&wanted));
    }

    #[test]
    fn a_part_that_is_not_what_its_digest_says_is_refused_and_leaves_nothing() {
        let world = World::new();
        let layer = world.layer(&[("file", "")]);
        let image = world.image(&ours(), &[&layer]);
        world.index(&[&image]);
        let other = fs::read(world.blob(&world.layer(&[("file", "another")]))).unwrap();
        for (part, bytes) in [(&layer, other), (&image, b"{\"layers\": []}".to_vec())] {
            fs::write(world.blob(part), bytes).unwrap();
            let digest = part["digest"].as_str().unwrap();
            assert_eq!(
                world.unpack(),
                cannot(&format!("the blob `{digest}` is damaged: it does not match its digest"))
            );
        }
        assert_eq!(fs::read_dir(world.state.path().join("images")).unwrap().count(), 0);
    }

    #[test]
    fn an_invalid_image_layout_is_refused_with_the_problem() {
        let world = World::new();
        let index = world.folder.path().join("index.json");
        assert_eq!(world.unpack(), cannot("its `index.json`: No such file or directory (os error 2)"));
        fs::write(&index, "{").unwrap();
        assert_eq!(world.unpack(), cannot("its `index.json`: EOF while parsing an object at line 1 column 1"));
        fs::write(&index, "{}").unwrap();
        assert_eq!(world.unpack(), cannot("its `index.json` lists no `manifests`"));
        let gone = json!({"digest": "sha256:00"});
        for (listed, problem) in [
            (json!({"digest": "md5:00"}), "the blob `md5:00`: No such file or directory (os error 2)".to_owned()),
            (json!({"digest": "../x:00"}), "`../x:00` is no digest".to_owned()),
            (gone.clone(), "the blob `sha256:00`: No such file or directory (os error 2)".to_owned()),
        ] {
            world.index(&[&listed]);
            assert_eq!(world.unpack(), cannot(&problem));
        }
        let empty = world.image(&ours(), &[]);
        world.index(&[&empty]);
        let digest = empty["digest"].as_str().unwrap();
        assert_eq!(world.unpack(), cannot(&format!("the manifest `{digest}` names no layer")));
        world.index(&[]);
        assert_eq!(world.unpack(), cannot("its indexes lead to no image"));
        let mut deep = world.put_json(&json!({"manifests": []}));
        for _ in 0..=DEPTH_MAX {
            deep = world.put_json(&json!({"manifests": [deep]}));
        }
        world.index(&[&deep]);
        assert_eq!(world.unpack(), cannot("its indexes are nested too deeply"));
        fs::remove_file(world.folder.path().join("oci-layout")).unwrap();
        assert_eq!(world.unpack(), cannot("it has no file `oci-layout`"));
    }
}
