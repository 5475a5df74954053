//! [`NcclReport`]: the all-reduces in the text that nccl-tests print, and the facts of NCCL's log in the same text.
//!
//! The text may come through mpirun, kubectl or a web page: each line may have a prefix, and lines may be cut or mixed.
//! Each line is read once. A row is taken only if its numbers agree with each other.

use crate::prelude::*;
use alloc::collections::{BTreeMap, BTreeSet};
use core::iter;

use serde::Serialize;

use crate::quote::excerpt;
use crate::topology::{Gpu, thousandths};

/// The data types of nccl-tests (`test_typenames` in its src/common.cu, old names too), by their size in bytes.
const TYPES: [(u64, &[&str]); 4] = [
    (1, &["int8", "uint8", "char", "f8e4m3", "f8e5m2"]),
    (2, &["half", "bfloat16"]),
    (4, &["int32", "uint32", "int", "float"]),
    (8, &["int64", "uint64", "double"]),
];

/// The programs of nccl-tests.
const PROGRAMS: [&str; 11] = [
    "all_reduce_perf",
    "all_gather_perf",
    "alltoall_perf",
    "alltoallv_perf",
    "broadcast_perf",
    "gather_perf",
    "hypercube_perf",
    "reduce_scatter_perf",
    "reduce_perf",
    "scatter_perf",
    "sendrecv_perf",
];

/// The program whose results are compared.
const ALL_REDUCE: &str = "all_reduce_perf";

/// The most NCCL variables that are kept.
const MAX_SETTINGS: usize = 32;

/// The most ranks whose devices are kept.
const MAX_RANKS: usize = 4_096;

/// The smallest algorithm bandwidth, MB/s, at which two decimals are enough to compare the numbers of a row.
const MIN_COMPARABLE: u64 = 1_000;

/// One measurement: out of place, with another buffer for the result, or in place.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Run {
    /// The time of one operation, ns.
    pub nanoseconds: u64,
    /// The algorithm bandwidth, MB/s: bytes / time.
    pub algorithm: u64,
    /// The bus bandwidth, MB/s: of an all-reduce of n ranks, 2(n - 1)/n × `algorithm`.
    pub bus: u64,
    /// The number of wrong values that the check found; 0 if the check was off. Versions that print the largest
    /// difference instead give 0, or 1 for `inf` and `nan`.
    pub wrong: u64,
}

/// The measurements of one size.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// The bytes that each GPU has.
    pub bytes: u64,
    /// The data type.
    #[serde(rename = "type")]
    pub data_type: &'static str,
    /// The measurement out of place.
    pub out_of_place: Run,
    /// The measurement in place, if there is one.
    pub in_place: Option<Run>,
}

impl Row {
    /// The faster measurement.
    pub fn best(&self) -> Run {
        self.in_place.filter(|run| run.bus > self.out_of_place.bus).unwrap_or(self.out_of_place)
    }
}

/// The device of a rank, as nccl-tests list it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct RankDevice {
    /// The host's name.
    pub host: Option<String>,
    /// The PCI domain and device number, which old versions do not print.
    pub slot: Option<(u32, u8)>,
    /// The PCI bus.
    pub bus: Option<u8>,
    /// The product name.
    pub model: Option<String>,
}

impl RankDevice {
    /// Returns true if the printed parts of the address are those of a GPU.
    pub(super) fn is_at(&self, gpu: &Gpu) -> bool {
        let is_same_slot = self.slot.is_none_or(|slot| slot == (gpu.pci.domain(), gpu.pci.device()));
        self.bus == Some(gpu.pci.bus()) && is_same_slot
    }
}

/// The all-reduces of a text.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NcclReport {
    /// The rows, one for each measured size, in the text's order. Never empty.
    pub rows: Vec<Row>,
    /// The devices by rank; empty if the text lists none.
    pub devices: BTreeMap<u32, RankDevice>,
    /// The number of connections through the host's memory in NCCL's log.
    pub shm: u64,
    /// The variables of NCCL that the text names, with their values.
    pub settings: BTreeMap<String, String>,
    /// The number of wrong values: the largest number of a row or of a summary.
    pub wrong: u64,
    /// The number of lines that begin like a row, but are cut, mixed with other lines, or contradict themselves.
    pub unreadable: usize,
}

/// The reason why a text has no result that can be compared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ReportError {
    /// No row of any program.
    #[error("no table of nccl-tests: no line with a size, a count, a data type and bandwidths")]
    NoTable,
    /// No rows but those that were cut or mixed.
    #[error("no readable row: {0} lines begin like one, but are cut, mixed with other lines, or contradict themselves")]
    Unreadable(usize),
    /// Tables of other programs only.
    #[error("no all-reduce: the tables are of {0}; run all_reduce_perf")]
    OtherProgram(String),
    /// One rank, whose rows have no bus bandwidth.
    #[error("an all-reduce of one GPU has no bandwidth")]
    OneGpu,
    /// Two runs with different numbers of ranks.
    #[error("the text has runs over {0} and over {1} GPUs; give the text of one run")]
    SeveralRuns(usize, usize),
}

/// The row of a line, whose program is not known yet.
struct ReadRow {
    row: Row,
    /// True if the row can be one of an all-reduce: data is reduced, to all ranks, and the count is that of all data.
    is_all_reduce: bool,
}

/// Reads a text line by line.
#[derive(Default)]
struct Reader {
    report: NcclReport,
    /// The program whose table comes next.
    program: Option<&'static str>,
    /// The other programs whose tables were seen.
    others: BTreeSet<&'static str>,
    /// The devices of the current run.
    devices: BTreeMap<u32, RankDevice>,
}

impl NcclReport {
    /// Reads a text.
    pub fn read(text: &str) -> Result<Self, ReportError> {
        let mut reader = Reader::default();
        for line in text.lines() {
            reader.read_line(line)?;
        }
        match reader.report.rows.is_empty() {
            false => Ok(reader.report),
            true if reader.devices.len() == 1 => Err(ReportError::OneGpu),
            true if reader.report.unreadable > 0 => Err(ReportError::Unreadable(reader.report.unreadable)),
            true if reader.others.is_empty() => Err(ReportError::NoTable),
            true => Err(ReportError::OtherProgram(reader.others.into_iter().collect::<Vec<_>>().join(", "))),
        }
    }

    /// The size with the highest bus bandwidth.
    pub fn best(&self) -> Option<&Row> {
        self.rows.iter().max_by_key(|row| row.best().bus)
    }

    /// The number of hosts that the devices are on; 1 if the text names none.
    pub fn hosts(&self) -> usize {
        self.devices.values().filter_map(|device| device.host.as_deref()).collect::<BTreeSet<_>>().len().max(1)
    }

    /// Returns true if each measurement fast enough to compare has the bus bandwidth of an all-reduce of n ranks:
    /// 2(n - 1)/n × the algorithm bandwidth.
    pub fn is_of(&self, ranks: usize) -> bool {
        let Some(others) = ranks.checked_sub(1).filter(|others| *others > 0) else { return false };
        let (ranks, others) = (ranks as u128, others as u128);
        let runs = self.rows.iter().flat_map(|row| [Some(row.out_of_place), row.in_place]).flatten();
        runs.filter(|run| run.algorithm >= MIN_COMPARABLE)
            .all(|run| agree(u128::from(run.algorithm) * 2 * others, u128::from(run.bus) * ranks))
    }
}

impl Reader {
    fn read_line(&mut self, line: &str) -> Result<(), ReportError> {
        if line.contains("_perf") {
            self.program = PROGRAMS.into_iter().find(|program| line.contains(program)).or(self.program);
        }
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.contains(&"nThread") {
            self.devices.clear();
        }
        self.read_log(&words);
        for summary in words.windows(6) {
            if let ["Out", "of", "bounds", "values", ":", wrong] = summary {
                self.report.wrong = self.report.wrong.max(wrong_values(wrong));
            }
        }
        if let Some((rank, device)) = rank_device(&words) {
            if self.devices.len() < MAX_RANKS {
                self.devices.insert(rank, device);
            }
            return Ok(());
        }
        match row(&words) {
            Some(Some(read)) => return self.add_row(read),
            Some(None) => self.report.unreadable += 1,
            None => {}
        }
        Ok(())
    }

    /// Adds a row of an all-reduce. Without a program's name, a row that can be one of an all-reduce counts as one.
    fn add_row(&mut self, read: ReadRow) -> Result<(), ReportError> {
        let assumed = if read.is_all_reduce { ALL_REDUCE } else { "another program" };
        let program = self.program.unwrap_or(assumed);
        if program != ALL_REDUCE {
            self.others.insert(program);
            return Ok(());
        }
        let (before, ranks) = (self.report.devices.len(), self.devices.len());
        if self.report.rows.is_empty() {
            self.report.devices.clone_from(&self.devices);
        } else if before != ranks {
            return Err(ReportError::SeveralRuns(before, ranks));
        }
        let runs = [Some(read.row.out_of_place), read.row.in_place];
        let wrong = runs.iter().flatten().map(|run| run.wrong).fold(0, u64::saturating_add);
        self.report.wrong = self.report.wrong.max(wrong);
        self.report.rows.push(read.row);
        Ok(())
    }

    /// Reads settings and connections through the host's memory, as NCCL's log and command lines have them.
    fn read_log(&mut self, words: &[&str]) {
        for place in 0..words.len() {
            let setting = match words.get(place..).unwrap_or_default() {
                ["via", by, ..] if by.starts_with("SHM/") => {
                    self.report.shm += 1;
                    None
                }
                [name, "set", "by", "environment", "to", value @ ..] => {
                    Some((*name, value.first().map_or("", |value| value.trim_end_matches('.'))))
                }
                [word, ..] => word.split_once('='),
                [] => None,
            };
            if let Some((name, value)) = setting.filter(|(name, _)| name.starts_with("NCCL_"))
                && self.report.settings.len() < MAX_SETTINGS
            {
                self.report.settings.insert(excerpt(name), excerpt(value.trim_matches('"')));
            }
        }
    }
}

/// Reads a line of the list of devices: `# Rank 0 Group 0 Pid 313 on host device 0 [0000:18:00] NVIDIA H100`.
fn rank_device(words: &[&str]) -> Option<(u32, RankDevice)> {
    let at = words.iter().position(|word| *word == "Rank")?;
    let rank = words.get(at + 1)?.parse().ok()?;
    let rest = words.get(at + 2..)?;
    let at = rest.iter().position(|word| *word == "device")?;
    rest.get(at + 1)?.parse::<u32>().ok()?;
    let address = rest.get(at + 2)?.strip_prefix('[')?.strip_suffix(']')?;
    let host = at.checked_sub(2).filter(|on| rest.get(*on) == Some(&"on")).and_then(|on| rest.get(on + 1));
    let hex = |text: &str| u32::from_str_radix(text.strip_prefix("0x").unwrap_or(text), 16).ok();
    let byte = |text: &str| hex(text).and_then(|number| u8::try_from(number).ok());
    let parts: Vec<&str> = address.split(':').take(4).collect();
    let (slot, bus) = match parts[..] {
        [domain, bus, device] => {
            let device = device.split_once('.').map_or(device, |(device, _)| device);
            (hex(domain).zip(byte(device)), byte(bus))
        }
        [bus] => (None, byte(bus)),
        _ => (None, None),
    };
    let model = rest.get(at + 3..).filter(|words| !words.is_empty()).map(|words| excerpt(&words.join(" ")));
    Some((rank, RankDevice { host: host.map(|host| excerpt(host)), slot, bus, model }))
}

/// Reads a row. `None` if the line is not a row; `Some(None)` if it begins like one, but cannot be read.
///
/// A row is a size, a count, a type, a reduction where the program has one, a root in newer versions, and then time,
/// algorithm and bus bandwidth and errors, out of place and in place.
fn row(words: &[&str]) -> Option<Option<ReadRow>> {
    let known =
        |word| TYPES.into_iter().find_map(|(size, names)| Some((*names.iter().find(|name| *name == word)?, size)));
    let (at, (data_type, size)) = words.iter().enumerate().find_map(|(at, word)| Some((at, known(word)?)))?;
    let [.., bytes, count] = words.get(..at)? else { return None };
    let (bytes, count) = (bytes.parse::<u64>().ok()?, count.parse::<u64>().ok()?);
    let read = measurements(words.get(at + 1..).unwrap_or_default(), data_type, bytes);
    let is_complete = count.checked_mul(size) == Some(bytes);
    Some(read.map(|read| ReadRow { is_all_reduce: read.is_all_reduce && is_complete, ..read }))
}

/// Reads the words after the type.
fn measurements(words: &[&str], data_type: &'static str, bytes: u64) -> Option<ReadRow> {
    let reduction = words.first().filter(|word| word.bytes().all(|byte| byte.is_ascii_alphabetic()));
    let words = words.get(usize::from(reduction.is_some())..)?;
    let is_decimal = |place: usize| words.get(place).and_then(|word| bandwidth(word)).is_some();
    // Both a root and a long time are whole numbers: the place of the bandwidths tells them apart.
    let root = words.first().filter(|word| is_whole(word) && is_decimal(2) && is_decimal(3));
    let words = words.get(usize::from(root.is_some())..)?;
    let out_of_place = run(words, bytes)?;
    // A measurement has four words; the last is the number of errors.
    let in_place = match words.get(4..) {
        Some(words) if words.len() >= 3 => Some(run(words, bytes)?),
        _ => None,
    };
    let is_all_reduce = reduction.is_some_and(|word| *word != "none") && root.is_none_or(|root| *root == "-1");
    Some(ReadRow { row: Row { bytes, data_type, out_of_place, in_place }, is_all_reduce })
}

/// Reads a measurement: time, algorithm and bus bandwidth, and errors, which may be absent.
fn run(words: &[&str], bytes: u64) -> Option<Run> {
    let [time, algorithm, bus, errors @ ..] = words else { return None };
    let wrong = errors.first().map_or(0, |errors| wrong_values(errors));
    let nanoseconds = thousandths(time).filter(|time| *time > 0)?;
    let run = Run { nanoseconds, algorithm: bandwidth(algorithm)?, bus: bandwidth(bus)?, wrong };
    // MB/s times ns are thousandths of a byte.
    let carried = u128::from(run.algorithm) * u128::from(run.nanoseconds);
    let is_consistent = run.algorithm < MIN_COMPARABLE || agree(carried, u128::from(bytes) * 1_000);
    (is_consistent && run.bus <= run.algorithm.saturating_mul(2).saturating_add(20)).then_some(run)
}

/// Reads a number of wrong values as C's `%g` writes it: a million is `1e+06`. Some versions print the largest
/// difference: a number below 1, which counts as 0, or `inf` or `nan`, which count as 1. `N/A` means that the check was
/// off.
fn wrong_values(text: &str) -> u64 {
    let (number, exponent) = text.split_once('e').unwrap_or((text, "0"));
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let Some(places) = exponent.parse::<i64>().ok().and_then(|places| usize::try_from(places).ok()) else { return 0 };
    let decimals = fraction.chars().chain(iter::repeat('0')).take(places.min(20));
    let digits: String = whole.chars().chain(decimals).collect();
    let is_too_long = is_whole(&digits) && !digits.starts_with('-');
    digits.parse().unwrap_or(if is_too_long { u64::MAX } else { matches!(text, "inf" | "nan" | "-nan").into() })
}

/// Returns true if two values differ by at most a fiftieth of `other`.
fn agree(one: u128, other: u128) -> bool {
    one.abs_diff(other).saturating_mul(50) <= other
}

/// Reads a bandwidth, which nccl-tests print with two decimals: fewer mean that the line was cut there. From 1000 GB/s
/// on the column has no room for two, so one is enough.
pub(super) fn bandwidth(text: &str) -> Option<u64> {
    let (whole, fraction) = text.split_once('.')?;
    let decimals = if whole.len() > 3 { 1..=2 } else { 2..=2 };
    decimals.contains(&fraction.len()).then(|| thousandths(text)).flatten()
}

/// Returns true for a whole number with an optional sign.
pub(super) fn is_whole(text: &str) -> bool {
    let digits = text.strip_prefix('-').unwrap_or(text);
    !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit())
}

/// Writes MB/s in the unit of nccl-tests, with two decimals.
pub fn gb_per_s(mb_per_s: u64) -> String {
    format!("{}.{:02} GB/s", mb_per_s / 1_000, mb_per_s % 1_000 / 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A made-up run of 4 GPUs, two of them listed, at 10 to 21 GB/s of algorithm bandwidth.
    const NEW: &str = "\
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 4 minBytes 1048576 maxBytes 4194304 step: 2(factor) warmup iters: 5 iters: 20
# Using devices
#  Rank  0 Group  0 Pid    10 on      node device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid    10 on      node device  1 [0000:0b:00] NVIDIA A100-SXM4-80GB
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw   busbw #wrong
     1048576        262144     float     sum      -1   100.00   10.49   15.73      0    95.00   11.04   16.56      0
     2097152        524288     float     sum      -1      100   20.97   31.46      0      105   19.97   29.96    N/A
# Out of bounds values : 0 OK
";

    #[test]
    fn newer_layout_is_read() {
        let report = NcclReport::read(NEW).unwrap();
        let bus: Vec<_> = report.rows.iter().map(|row| (row.bytes, row.best().bus)).collect();
        assert_eq!(bus, [(1_048_576, 16_560), (2_097_152, 31_460)]);
        assert_eq!(report.best().unwrap().bytes, 2_097_152);
        assert_eq!((report.unreadable, report.hosts(), report.devices.len()), (0, 1, 2));
        assert_eq!((report.devices[&0].bus, report.devices[&0].slot), (Some(7), None));
        assert_eq!((report.devices[&1].bus, report.devices[&1].slot), (Some(11), Some((0, 0))));
        assert_eq!(report.devices[&1].model.as_deref(), Some("NVIDIA A100-SXM4-80GB"));
        assert!(report.is_of(4) && !report.is_of(8) && !report.is_of(0));
    }

    #[test]
    fn rows_are_read_in_every_layout_and_behind_prefixes() {
        for (line, bus) in [
            ("1048576 262144 float sum 100.0 10.49 15.73 1e-07 95.0 11.04 16.56 2e-07", 16_560),
            ("1048576 262144 float sum 100 10.49 15.73 1e-07 95 11.04 16.56 N/A", 16_560),
            ("1048576 262144 float sum -1 100.0 10.49 15.73", 15_730),
            ("1048576 524288 bfloat16 avg -1 100.0 10.49 15.73 0", 15_730),
            ("[1,0]<stdout>: 1048576 262144 float sum -1 100.0 10.49 15.73 0 95.0 11.04 16.56 0", 16_560),
            ("2026-02-16T10:00:04Z 0: 1048576 262144 float sum -1 100.0 10.49 15.73 0 95.0 11.04 16.56 0", 16_560),
            ("1048576 262144 float sum -1 100.0 10.49 15.73 0 95.0 11.04 16.56 0 RING SIMPLE 24", 16_560),
        ] {
            let report = NcclReport::read(line).unwrap_or_else(|error| panic!("{line}: {error}"));
            assert_eq!(report.best().unwrap().best().bus, bus, "{line}");
        }
    }

    #[test]
    fn cut_and_mixed_rows_are_counted_and_left_out() {
        for line in [
            "1048576 262144 float sum -1 100.0 10.49 15.7",
            "1048576 262144 float sum -1 100.0 10.49",
            "1048576 262144 float",
            "1048576 262144 float sum -1 100.0 10.49 15.73 0 95.0 11.04 16.",
            "1048576 262144 float sum -1 900.0 10.49 15.73 0",
            "1048576 262144 float sum -1 100.0 10.49 35.73 0",
            "1048576 262144 float sum -1[0] 100.0 10.49 15.73 0",
        ] {
            assert_eq!(NcclReport::read(line), Err(ReportError::Unreadable(1)), "{line}");
            let text = format!("{NEW}{line}\n");
            let report = NcclReport::read(&text).unwrap();
            assert_eq!((report.rows.len(), report.unreadable), (2, 1), "{line}");
        }
    }

    #[test]
    fn other_programs_are_refused_by_name() {
        for text in ["", "nothing\nof the kind", "# nThread 1 nGpus 8", "float", "1 float"] {
            assert_eq!(NcclReport::read(text), Err(ReportError::NoTable), "{text}");
        }
        let gather = "# Collective test starting: all_gather_perf\n1048576 65536 float none -1 100.0 10.49 7.87 0";
        assert_eq!(NcclReport::read(gather), Err(ReportError::OtherProgram("all_gather_perf".into())));
        // Without a name: no reduction, a reduction to one rank, or the count of a rank's part.
        for row in ["65536 float none -1", "262144 float sum 0", "65536 float sum -1"] {
            let text = format!("1048576 {row} 100.0 10.49 7.87 0");
            assert_eq!(NcclReport::read(&text), Err(ReportError::OtherProgram("another program".into())), "{row}");
        }
        let both = format!("{gather}\n{NEW}");
        assert_eq!(NcclReport::read(&both).unwrap().rows.len(), 2);
    }

    #[test]
    fn runs_over_different_numbers_of_gpus_are_refused() {
        let one = NEW.replace("#  Rank  1", "#  rank");
        assert_eq!(NcclReport::read(&format!("{NEW}{one}")), Err(ReportError::SeveralRuns(2, 1)));
        assert_eq!(NcclReport::read(&format!("{NEW}{NEW}")).unwrap().rows.len(), 4);
    }

    #[test]
    fn nccl_log_gives_settings_and_shm_connections() {
        let text = format!(
            "node:1:2 [0] NCCL INFO NCCL_P2P_LEVEL set by environment to LOC\nmpirun -x NCCL_ALGO=Ring \\\n\
             node:1:2 [0] NCCL INFO Channel 00 : 1[2a000] -> 0[27000] via SHM/direct/direct\n\
             node:1:2 [0] NCCL INFO Channel 00/0 : 0[1] -> 1[2] via P2P/IPC/read\n\
             node:1:2 [0] NCCL INFO 24 coll channels, 16 nvls channels, 32 p2p channels\n{NEW}"
        );
        let report = NcclReport::read(&text).unwrap();
        assert_eq!(report.shm, 1);
        assert_eq!(report.settings["NCCL_P2P_LEVEL"], "LOC");
        assert_eq!(report.settings["NCCL_ALGO"], "Ring");
    }

    #[test]
    fn decimals_are_read_as_thousandths() {
        for (text, number) in [("0.00", 0), ("476.53", 476_530), ("9542917", 9_542_917_000), ("1.2345", 1_234)] {
            assert_eq!(thousandths(text), Some(number), "{text}");
        }
        for text in ["", ".5", "-1", "+1", "1e3", "1.5e1", "1.2.3", "N/A", "99999999999999999999"] {
            assert_eq!(thousandths(text), None, "{text}");
        }
    }

    #[test]
    fn bandwidth_that_was_cut_is_refused() {
        assert_eq!(
            [bandwidth("116.26"), bandwidth("0.97"), bandwidth("1234.5")],
            [Some(116_260), Some(970), Some(1_234_500)]
        );
        assert_eq!([bandwidth("116.2"), bandwidth("116."), bandwidth("116")], [None; 3]);
        assert_eq!(gb_per_s(476_530), "476.53 GB/s");
    }
}
