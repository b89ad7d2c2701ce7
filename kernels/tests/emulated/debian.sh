# Sourced by the scripts beside it: Debian's packages, unpacked below $work instead of installed. $name: what the messages call the run.

cannot() { echo "emulated $name: skipped: $*"; exit "${REQUIRED:-0}"; }

keys=/usr/share/keyrings/debian-archive-keyring.gpg
mirror=$( (grep -rhoE "https?://[^ ]+/debian/?( |\$)" /etc/apt/ 2>/dev/null || true) | grep -v snapshot | head -1 | tr -d " ")

need_debian() {
  [[ $(uname -sm) == "Linux x86_64" ]] || cannot "the emulator's packages are for x86-64 Linux"
  [[ -n $mirror && -e $keys ]] || cannot "apt uses no mirror of Debian here, or there is no $keys"
}

# Runs apt-get with its state in a directory of its own: apt_in SUITE ARCHITECTURE COMMAND…
apt_in() {
  local suite=$1 arch=$2 state=$work/apt-$1-$2; shift 2
  mkdir -p "$state"/{state/lists/partial,cache/archives/partial}; : >>"$state/status"
  printf 'Types: deb\nURIs: %s\nSuites: %s\nComponents: main\nArchitectures: %s\nSigned-By: %s\n' "$mirror" "$suite" "$arch" "$keys" >"$state/debian.sources"
  apt-get -qq -o APT::Architecture="$arch" -o APT::Architectures::="$arch" -o Dir::State="$state/state" -o Acquire::Retries=2 \
    -o Dir::State::status="$state/status" -o Dir::Cache="$state/cache" -o Dir::Etc::sourcelist="$state/debian.sources" \
    -o Dir::Etc::sourceparts=/dev/null -o APT::Install-Recommends=false -o APT::Sandbox::User=root "$@"
}

# Downloads packages with all they need, and unpacks them: unpack SUITE ARCHITECTURE ROOT PACKAGE…
unpack() {
  local suite=$1 arch=$2 root=$3 package; shift 3
  rm -rf "$root" "$work/apt-$suite-$arch"
  apt_in "$suite" "$arch" update >&2 || true  # it succeeds without a network as well
  apt_in "$suite" "$arch" install -y --download-only "$@" >&2 || cannot "Debian's packages for $suite $arch cannot be downloaded"
  mkdir -p "$root"
  for package in "$work/apt-$suite-$arch"/cache/archives/*.deb; do
    dpkg --fsys-tarfile "$package" | tar -x -C "$root" --exclude='./usr/share/doc*' --exclude='./usr/share/locale*'
  done
  rm -rf "$work/apt-$suite-$arch" && touch "$root/.complete"
}
