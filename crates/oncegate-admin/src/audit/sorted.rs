//! Sorts any number of rows in a bounded amount of memory: sorted runs in one file, merged at the
//! end.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::ops::Range;
use std::sync::Arc;

use tokio::task::JoinHandle;

use super::row::{EncodedRow, Row};

/// The most bytes that are read ahead of the merge, over all runs, unless there are so many runs
/// that each must have the least.
const READ_AHEAD_BYTES: usize = 16 << 20;

/// The most and the fewest rows that are read ahead of one run.
const READ_AHEAD_ROWS: Range<usize> = 64..16_384;

/// Collects rows: at most `run_rows` in memory, and as many that are being written.
#[derive(Debug)]
pub(super) struct Sorter {
    rows: Vec<EncodedRow>,
    run_rows: usize,
    writing: Option<JoinHandle<io::Result<Vec<EncodedRow>>>>,
    file: Arc<File>,
    /// The bytes of each run in the file.
    runs: Vec<Range<u64>>,
}

impl Sorter {
    /// Keeps its runs in `file`, from its beginning.
    pub(super) fn new(file: File, run_rows: usize) -> Self {
        Self {
            rows: Vec::new(),
            run_rows,
            writing: None,
            file: Arc::new(file),
            runs: Vec::new(),
        }
    }

    pub(super) fn push(&mut self, row: &Row) {
        self.rows.push(row.encode());
    }

    /// Writes a run if there are enough rows for one; waits for the run before it.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) async fn make_room(&mut self) -> io::Result<()> {
        if self.rows.len() >= self.run_rows {
            self.write_run().await
        } else {
            Ok(())
        }
    }

    async fn write_run(&mut self) -> io::Result<()> {
        let empty = self.written().await?;
        let mut rows = std::mem::replace(&mut self.rows, empty);
        let begin = self.runs.last().map_or(0, |run| run.end);
        let end = begin + (rows.len() * Row::BYTES) as u64;
        self.runs.push(begin..end);
        let file = Arc::clone(&self.file);
        self.writing = Some(tokio::task::spawn_blocking(move || {
            rows.sort_unstable();
            let mut file = &*file;
            file.seek(SeekFrom::Start(begin))?;
            file.write_all(rows.as_flattened())?;
            rows.clear();
            Ok(rows)
        }));
        Ok(())
    }

    /// Waits for the run that is being written, and returns its memory.
    async fn written(&mut self) -> io::Result<Vec<EncodedRow>> {
        match &mut self.writing {
            None => Ok(Vec::new()),
            Some(writing) => {
                let rows = writing.await.map_err(io::Error::other)?;
                self.writing = None;
                rows
            }
        }
    }

    /// Writes the last run, and returns all rows in order.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub(super) async fn finish(mut self) -> io::Result<Merged> {
        self.write_run().await?;
        drop(self.written().await?);
        let rows = READ_AHEAD_BYTES / Row::BYTES / self.runs.len().max(1);
        let most = rows.clamp(READ_AHEAD_ROWS.start, READ_AHEAD_ROWS.end);
        let cursors = self.runs.into_iter().map(|left| Cursor {
            left,
            rows: Vec::new(),
            most,
        });
        Ok(Merged {
            file: self.file,
            cursors: cursors.collect(),
            heads: BinaryHeap::new(),
            begun: false,
        })
    }
}

/// The rows of all runs in order. Reading them blocks.
#[derive(Debug)]
pub(super) struct Merged {
    file: Arc<File>,
    cursors: Vec<Cursor>,
    /// The next row of each run, with the number of the run.
    heads: BinaryHeap<Reverse<(EncodedRow, usize)>>,
    begun: bool,
}

/// The rest of one run.
#[derive(Debug)]
struct Cursor {
    /// The bytes of the file that are not read yet.
    left: Range<u64>,
    /// The rows that were read, the next one last.
    rows: Vec<EncodedRow>,
    most: usize,
}

impl Cursor {
    fn next(&mut self, mut file: &File) -> io::Result<Option<EncodedRow>> {
        if self.rows.is_empty() && !self.left.is_empty() {
            let left = (self.left.end - self.left.start) / Row::BYTES as u64;
            let count = usize::try_from(left).unwrap_or(usize::MAX).min(self.most);
            self.rows.resize(count, [0; Row::BYTES]);
            file.seek(SeekFrom::Start(self.left.start))?;
            file.read_exact(self.rows.as_flattened_mut())?;
            self.left.start += (count * Row::BYTES) as u64;
            self.rows.reverse();
        }
        Ok(self.rows.pop())
    }
}

impl Merged {
    /// Returns the next row; `None` after the last one.
    ///
    /// # Errors
    /// When the file cannot be read.
    pub(super) fn next(&mut self) -> io::Result<Option<Row>> {
        if !self.begun {
            self.begun = true;
            for (number, cursor) in self.cursors.iter_mut().enumerate() {
                if let Some(row) = cursor.next(&self.file)? {
                    self.heads.push(Reverse((row, number)));
                }
            }
        }
        let Some(Reverse((row, number))) = self.heads.pop() else {
            return Ok(None);
        };
        if let Some(cursor) = self.cursors.get_mut(number)
            && let Some(following) = cursor.next(&self.file)?
        {
            self.heads.push(Reverse((following, number)));
        }
        Ok(Some(Row::decode(&row)))
    }
}

#[cfg(test)]
mod tests {
    use oncegate_core::key::Digest;

    use super::super::row::{RowPlace, What};
    use super::*;

    #[tokio::test]
    async fn runs_of_any_size_are_merged_in_order() {
        let seed = fastrand::u64(..);
        println!("seed {seed}");
        let mut random = fastrand::Rng::with_seed(seed);
        for (count, run_rows) in [(0, 10), (9, 10), (10, 10), (100_000, 30_000), (5_000, 7)] {
            let mut sorter = Sorter::new(tempfile::tempfile().unwrap(), run_rows);
            let mut events = Vec::new();
            for offset in 0..count {
                let event = u128::from(random.u64(..count));
                events.push(event);
                let place = RowPlace {
                    offset,
                    ..RowPlace::default()
                };
                sorter.push(&Row {
                    event,
                    what: What::Effect,
                    place,
                    digest: Digest::from_bytes([0; 16]),
                });
                sorter.make_room().await.unwrap();
            }
            let mut merged = sorter.finish().await.unwrap();
            let mut found = Vec::new();
            let mut last = None;
            while let Some(row) = merged.next().unwrap() {
                assert!(
                    last < Some((row.event, row.place)),
                    "rows of one event keep their order"
                );
                last = Some((row.event, row.place));
                found.push(row.event);
            }
            events.sort_unstable();
            assert_eq!(found, events);
        }
    }
}
