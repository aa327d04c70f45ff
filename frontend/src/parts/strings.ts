/** Interface strings, in English and Chinese. */

export const strings = {
  // Frame
  skip: { en: "Skip to the content", zh: "跳到正文" },
  views: { en: "Views", zh: "视图" },
  language: { en: "Language", zh: "语言" },
  theme: { en: "Colours", zh: "配色" },
  theme_auto: { en: "System", zh: "跟随系统" },
  theme_light: { en: "Light", zh: "浅色" },
  theme_dark: { en: "Dark", zh: "深色" },
  copyLink: { en: "Copy link", zh: "复制链接" },
  copied: { en: "Copied", zh: "已复制" },
  copy: { en: "Copy", zh: "复制" },
  linkHere: { en: "Link to this view", zh: "此视图的链接" },
  generatedBy: {
    en: "Made by polyhead {version}. This file is self-contained and makes no network requests.",
    zh: "由 polyhead {version} 生成。此文件自含全部内容，不访问网络。",
  },
  factHeads: { en: "{heads} heads in {layers} layers", zh: "{layers} 层共 {heads} 个头" },
  factTokens: { en: "{tokens} tokens of {documents} documents", zh: "{documents} 篇文档的 {tokens} 个词元" },
  factContext: { en: "context of up to {context} tokens", zh: "上下文最多 {context} 个词元" },
  interrupted: { en: "the run was interrupted: statistics cover the text until then", zh: "运行被中断：统计量只涵盖此前的文本" },
  overview: { en: "Overview", zh: "总览" },
  charts: { en: "Charts", zh: "图表" },
  similar: { en: "Similar heads", zh: "相似的头" },
  importance: { en: "Head importance", zh: "头的重要性" },
  syntax: { en: "Syntax", zh: "句法" },
  findings: { en: "Findings", zh: "发现" },
  saveSvg: { en: "Save “{title}” as SVG", zh: "将“{title}”存为 SVG" },
  savePng: { en: "Save “{title}” as PNG", zh: "将“{title}”存为 PNG" },
  saveCsv: { en: "Save “{title}” as CSV", zh: "将“{title}”存为 CSV" },
  showAll: { en: "Show all {count}", zh: "显示全部 {count} 行" },
  asTable: { en: "As a table", zh: "以表格显示" },

  // Names and numbers
  nameInStack: { en: "{name} ({stack})", zh: "{name}（{stack}）" },
  nameWithOrigin: { en: "{name}, {origin}", zh: "{name}，{origin}" },
  edited: { en: "Edited: {edits}", zh: "经过编辑：{edits}" },
  layerName: { en: "Layer {layer}", zh: "第 {layer} 层" },
  headName: { en: "Head {head}", zh: "第 {head} 头" },
  head: { en: "Head", zh: "头" },
  role: { en: "Role", zh: "角色" },
  roles: { en: "Roles", zh: "角色" },
  noRole: { en: "no role", zh: "无角色" },
  inNats: { en: "{number} nats", zh: "{number} 奈特" },
  inTokens: { en: "{number} tokens", zh: "{number} 个词元" },
  group_attention: { en: "Attention pattern", zh: "注意力模式" },
  group_output: { en: "Output and circuits", zh: "输出与回路" },
  group_importance: { en: "Importance", zh: "重要性" },
  group_other: { en: "Other", zh: "其他" },
  group_companion: {
    en: "Std, max, error, chance",
    zh: "标准差、最大值、误差、随机",
  },
  unitNats: { en: "nats", zh: "奈特" },
  unitTokens: { en: "tokens", zh: "词元" },
  labelWithUnit: { en: "{label}, {unit}", zh: "{label}（{unit}）" },

  // Summary at the top of the overview
  summary: { en: "Summary", zh: "概要" },
  summaryNames: {
    en: "L2H7 is head 7 of layer 2. Layers and heads are counted from 0.",
    zh: "L2H7 即第 2 层第 7 头。层与头都从 0 数起。",
  },
  summaryPrevious: { en: "Which are previous-token heads?", zh: "哪些是前一词元头？" },
  summaryNoPrevious: { en: "None reliably.", zh: "没有稳定的此类头。" },
  summaryWhichRedundant: { en: "Which are redundant?", zh: "哪些头是冗余的？" },
  summaryRedundant: {
    en: "the other heads of its layer predict {share} of the output of the first",
    zh: "同层其他头可预测第一个头输出的 {share}",
  },
  summaryNotRedundant: {
    en: "None: the other heads of a layer predict less than {threshold} of each.",
    zh: "没有：同层其他头对每个头的预测都不到 {threshold}。",
  },
  summaryImportant: { en: "Which are most important?", zh: "哪些头最重要？" },
  summaryFirst: { en: "the first {evidence}", zh: "第一个{evidence}" },
  summaryMost: { en: "the first: {column} {value}", zh: "第一个：{column} {value}" },
  summaryMore: { en: "more", zh: "更多" },

  // Overview
  allFindings: { en: "All {count} findings", zh: "全部 {count} 条发现" },
  seeEvidence: { en: " (see the evidence)", zh: "（查看证据）" },
  allHeads: { en: "All heads", zh: "所有头" },
  allHeadsAbout: {
    en:
      "A transformer processes a text layer by layer. In each layer several attention heads compute, for every " +
      "token, how much it attends to each other token. Each square is one head; open it for details.",
    zh: "Transformer 逐层处理文本。每一层有若干个注意力头，为每个词元计算它对其他词元的注意力。每个方格是一个头，打开可查看详情。",
  },
  colourBy: { en: "Colour by", zh: "着色依据" },
  byRole: { en: "Role", zh: "角色" },
  byRoleAbout: {
    en:
      "A role summarises what a head does; the letters in a square stand for its most informative one. A head " +
      "without letters has no role that the evidence supports.",
    zh: "角色概括一个头的作用；方格中的字母代表其信息量最大的角色。没有字母的头没有证据支持的角色。",
  },
  byMap: { en: "Attention map", zh: "注意力图" },
  byMapAbout: {
    en:
      "Each square is the attention map of a head: rows are query tokens, from the start of the text to its " +
      "end, columns are key tokens. A diagonal is local attention, a stripe along the left edge an attention " +
      "sink on the first token.",
    zh: "每个方格是一个头的注意力图：行是查询词元，从文首到文末；列是键词元。对角线表示局部注意力，左边缘的竖条表示首个词元上的注意力汇聚点（attention sink）。",
  },
  onlyRole: { en: "Only heads with the role", zh: "只看具有此角色的头" },
  anyRole: { en: "any or none", zh: "不限" },
  shownHeads: { en: "{shown} of {all} heads", zh: "{all} 个头中的 {shown} 个" },
  gridTitle: { en: "Layers by heads", zh: "层 × 头" },
  gridCorner: { en: "layer", zh: "层" },
  gridAcross: { en: "head", zh: "头" },
  gridName: {
    en: "{stack}, coloured by: {coloured}. Arrow keys move, Enter opens a head.",
    zh: "{stack}，着色依据：{coloured}。方向键移动，回车打开。",
  },
  previewHint: {
    en: "Hover over a square for a preview of the head; click it, or press Enter, for details.",
    zh: "指向方格可预览一个头；点击或按回车可查看详情。",
  },
  headsTable: { en: "Table of heads", zh: "头的表格" },
  whichNumbers: { en: "Statistics", zh: "统计量" },
  allColumns: { en: "All columns of these heads", zh: "这些头的所有列" },

  // Charts
  chartsAbout: {
    en:
      "Any column of heads.parquet as a heat map, and any two as a scatter plot. The name of a column in files and " +
      "commands follows its label. A CSV file has the numbers in full precision under these names.",
    zh: "heads.parquet 的任意一列可作热图，任意两列可作散点图。标签之后是该列在文件与命令中的名称。CSV 文件以这些名称保存全精度的数值。",
  },
  whichColumn: { en: "Column", zh: "列" },
  numbersInCells: { en: "Numbers in the cells", zh: "在方格中显示数值" },
  scatter: { en: "Two columns", zh: "两列对比" },
  scatterX: { en: "Horizontal axis", zh: "横轴" },
  scatterY: { en: "Vertical axis", zh: "纵轴" },
  colouring_layer: { en: "Layer", zh: "层" },
  colouring_role: { en: "Role", zh: "角色" },
  colouring_none: { en: "One colour", zh: "单色" },
  onePoint: { en: "One point per head", zh: "每个点是一个头" },
  scatterTitle: { en: "{y} by {x}", zh: "{y} 与 {x}" },
  scatterHint: {
    en: "Hover over a point for the name of its head; click it for details. Arrow keys move between points.",
    zh: "指向一个点可查看头的名称，点击可查看详情。方向键在各点之间移动。",
  },
  scatterDescribed: {
    en: "Scatter plot of {heads} heads: {x} across, {y} up. Arrow keys move between points, Enter opens a head.",
    zh: "{heads} 个头的散点图：横轴为{x}，纵轴为{y}。方向键在各点之间移动，回车打开。",
  },
  scatterOmitted: {
    en: "Not drawn: {count} heads of which a value was not computed or is infinite. The CSV file has all heads.",
    zh: "未绘制：{count} 个头有数值未计算或为无穷大。CSV 文件包含所有头。",
  },
  pointDescribed: { en: "{head}: {numbers}", zh: "{head}：{numbers}" },

  // Details of one head
  noSuchHead: { en: "This model has no such head", zh: "此模型没有这个头" },
  toOverview: { en: "Back to all heads", zh: "回到所有头" },
  neighbours: { en: "Neighbouring heads", zh: "相邻的头" },
  previousHead: { en: "previous head", zh: "上一个头" },
  nextHead: { en: "next head", zh: "下一个头" },
  noRoleSupported: { en: "None of the roles is supported by the evidence for this head.", zh: "所考察的角色中，没有一个得到证据支持。" },
  examples: { en: "Attention on example texts", zh: "示例文本上的注意力" },
  examplesAbout: {
    en:
      "Choose a word, by pointer or keyboard. Shaded words are those it attends to, the stronger the more; a " +
      "bar under a word means that it attends to the chosen one. With none chosen, the shade is the average " +
      "attention that each word receives.",
    zh: "用指针或键盘选择一个词。着色的词是它所关注的词，颜色越强注意力越多；词下的横条表示该词关注所选的词。未选择时，颜色表示每个词平均得到的注意力。",
  },
  examplesAboutTwo: {
    en:
      "Cross-attention: words of one text attend to words of another. Choose one of the upper words to see what" +
      " it attends to, or one of the lower to see which words attend to it.",
    zh: "交叉注意力：一段文本的词关注另一段文本的词。选择上方的词可看到它关注哪里，选择下方的词可看到哪些词关注它。",
  },
  queries: { en: "Queries", zh: "查询" },
  keys: { en: "Keys", zh: "键" },
  mostAttended: { en: "Most attended, on average", zh: "平均得到最多注意力" },
  wordAttendsTo: { en: "“{word}” attends to", zh: "“{word}”关注" },
  wordAttendedBy: { en: "“{word}” is attended to by", zh: "关注“{word}”的有" },
  noneAbove: { en: "none above {share}", zh: "没有超过 {share} 的" },
  tokenNumber: { en: "token {number}", zh: "第 {number} 个词元" },
  drawAs: { en: "Draw as", zh: "绘制方式" },
  asWords: { en: "Words", zh: "词" },
  asLines: { en: "Words and lines", zh: "词与连线" },
  whichExample: { en: "Which text", zh: "选择文本" },
  exampleNumber: { en: "Text {number}", zh: "文本 {number}" },
  blockMap: { en: "Attention map, averaged over texts", zh: "注意力图（所有文本平均）" },
  blockMapAbout: {
    en:
      "Average over all texts. Rows are query positions in the text, columns key positions. The colour scale is" +
      " a square root, so that small weights remain visible.",
    zh: "所有文本的平均。行是查询在文中的位置，列是键的位置。颜色按平方根变化，使较小的权重也能看见。",
  },
  mapAcross: { en: "key tokens", zh: "键词元" },
  mapDown: { en: "query tokens", zh: "查询词元" },
  mapCell: { en: "From {query} to {key}: {share}", zh: "从{query}到{key}：{share}" },
  mapHint: { en: "Hover over the map to read a value.", zh: "指向注意力图可读取数值。" },
  tokensFromTo: { en: "tokens {from}–{to}", zh: "第 {from}–{to} 个词元" },
  mapDescribed: {
    en:
      "Attention map with {rows} by {columns} cells. {diagonal} of the attention is on the diagonal, {first} on" +
      " the first tokens. It is strongest from block {row} to block {column}.",
    zh: "注意力图，{rows} × {columns} 格。{diagonal} 的注意力在对角线上，{first} 在最前面的词元上。最强处是从第 {row} 块到第 {column} 块。",
  },
  offsetProfile: { en: "Attention by distance", zh: "按距离的注意力" },
  offsetAbout: {
    en:
      "Share of attention on tokens at each offset before (−) or after (+) the query token. 0 is the token " +
      "itself. Far offsets are binned; the height of a bin is the mean of its offsets.",
    zh: "查询词元之前（−）或之后（+）各偏移处的词元所占的注意力比例。0 为词元自身。较远的偏移合并显示，其高度为各偏移的平均。",
  },
  offsetAxis: { en: "offset in tokens: before (−) or after (+)", zh: "偏移（词元数）：之前（−）或之后（+）" },
  sharePerOffset: { en: "share of attention per offset", zh: "每个偏移的注意力比例" },
  offsetBar: { en: "{offsets}: {share} of the attention in all", zh: "{offsets}：共占注意力的 {share}" },
  offsetDescribed: { en: "Bar chart of attention by distance. The largest: {most}.", zh: "按距离的注意力柱状图。最大的：{most}。" },
  roleScores: { en: "Role scores", zh: "角色得分" },
  roleScoresAbout: { en: "With 95% intervals over the {over} and the chance level.", zh: "附在{over}上的 95% 区间与随机水平。" },
  over_documents: { en: "documents", zh: "文档" },
  over_contexts: { en: "contexts", zh: "上下文" },
  notComputed: { en: "not computed", zh: "未计算" },
  notANumber: { en: "not a number (NaN)", zh: "不是数（NaN）" },
  keyHolds: { en: "has the role", zh: "具有该角色" },
  keyHoldsNot: { en: "does not have it", zh: "不具有" },
  keyInterval: { en: "interval", zh: "区间" },
  keyChance: { en: "chance", zh: "随机水平" },
  roleScoresDescribed: {
    en:
      "Scores of every role with interval and chance level; the head has: {roles}. All numbers are in the table" +
      " below.",
    zh: "每个角色的得分、区间与随机水平；此头具有：{roles}。全部数字见下方表格。",
  },
  score: { en: "Score", zh: "得分" },
  interval: { en: "Interval (95%)", zh: "区间（95%）" },
  chance: { en: "Chance", zh: "随机水平" },
  evidence: { en: "Evidence", zh: "证据" },
  mostSimilarHeads: { en: "Most similar heads", zh: "最相似的头" },
  mostSimilarAbout: {
    en: "Heads with the most similar or opposite outputs (cosine similarity; 1 is identical, −1 opposite).",
    zh: "输出最相似或相反的头（余弦相似度；1 为相同，−1 为相反）。",
  },
  sameLayer: { en: "same layer", zh: "同一层" },
  otherLayer: { en: "other layer", zh: "其他层" },
  topKeys: { en: "Top keys", zh: "最受关注的键" },
  topKeysAbout: {
    en: "Tokens that receive the most attention from this head, over the whole text.",
    zh: "在整个文本中从此头得到最多注意力的词元。",
  },
  numbers: { en: "Statistics, among all heads", zh: "统计量，与所有头相比" },
  numbersAbout: {
    en:
      "Each tick is a head of this model, the dot is this one, the longer tick the chance level, where it is " +
      "known. ± is the standard error. Open a name for an explanation.",
    zh: "每条短线是此模型的一个头，圆点是本头，较长的线是随机水平（若已知）。± 为标准误。展开名称可查看解释。",
  },
  number: { en: "Statistic", zh: "统计量" },
  value: { en: "Value", zh: "值" },
  rank: { en: "Rank", zh: "排名" },
  rankOf: { en: "{rank} of {all}", zh: "第 {rank} / {all}" },
  amongAll: { en: "Among all heads", zh: "在所有头中" },
  spread: { en: "Mean over tokens; their standard deviation is {spread}.", zh: "在词元上的均值；标准差为 {spread}。" },
  stripDescribed: {
    en: "All heads are between {low} and {high}; this one ranks {rank} of {all} from the top.",
    zh: "所有头介于 {low} 与 {high} 之间；此头从高到低排第 {rank}，共 {all} 个。",
  },

  // Similar heads
  similarAbout: {
    en:
      "A head is redundant if the other heads of its layer predict most of its output. Below: redundant heads, all " +
      "pairs of heads of a layer, and pairs across layers.",
    zh: "若同层其他头能预测一个头输出的大部分，它就是冗余的。下面是冗余的头、同层的每一对头，以及跨层的配对。",
  },
  mostSimilarPair: {
    en: "The pair with the largest cosine similarity, in absolute value: {one} and {other}, {value}.",
    zh: "余弦相似度绝对值最大的一对头：{one} 与 {other}，{value}。",
  },
  redundant: { en: "Redundant heads", zh: "冗余的头" },
  noRedundant: { en: "No head reaches {threshold}.", zh: "没有头达到 {threshold}。" },
  noRedundancy: {
    en: "Not measured: the text was too short, or the run is of an earlier version.",
    zh: "没有测量：文本太短，或者是较早版本的运行。",
  },
  redundancyAbout: {
    en:
      "Heads of whose output the other heads of the layer predict at least {threshold} linearly, on held-out tokens: " +
      "so much they can compensate if the head is removed. Each is measured with all others present; of two heads " +
      "that predict each other, one is needed.",
    zh: "同层其他头在留出词元上可线性预测其输出至少 {threshold} 的头：去掉它时其他头能补偿这么多。每个头都在其他头保留时测量；互相预测的两个头需保留其一。",
  },
  predictedBy: { en: "{share} by", zh: "其中 {share} 可由" },
  predictedAlone: { en: "alone, cosine {cosine}", zh: "单独预测，余弦 {cosine}" },
  editPrune: {
    en: "Prune it, with compensation in the remaining heads on calibration data:",
    zh: "剪去它，并用校准数据在保留的头中补偿：",
  },
  editShare: {
    en: "Prune {share} of all heads, those whose removal is best compensated on calibration data:",
    zh: "剪去全部头的 {share}，即在校准数据上最易补偿的那些：",
  },
  copyCommand: { en: "Copy the command", zh: "复制命令" },
  similarityTitle: { en: "Similarity of heads of a layer", zh: "同层的头的相似度" },
  similarityNote: { en: "Cosine similarity of outputs, for all pairs of heads of a layer.", zh: "同层每一对头的输出的余弦相似度。" },
  similarityDescribed: {
    en: "Histogram of the cosine similarity of {pairs} pairs of heads.",
    zh: "{pairs} 对头的余弦相似度直方图。",
  },
  pairsOfHeads: { en: "pairs of heads", zh: "头的对数" },
  cosine: { en: "cosine", zh: "余弦" },
  withinLayers: { en: "All pairs within a layer", zh: "层内的所有头对" },
  relation: { en: "Measure", zh: "度量" },
  matrixHint: {
    en: "Hover over a matrix to read a value; rows and columns are the heads of the layer.",
    zh: "指向矩阵可读取数值；行与列都是该层的头。",
  },
  pairReadout: { en: "{one} and {other}: {value}", zh: "{one} 与 {other}：{value}" },
  matrixDescribed: {
    en: "{layer}: the most similar are {one} and {other}, {value}.",
    zh: "{layer}：最相似的是 {one} 与 {other}，{value}。",
  },
  mostSimilar: { en: "The most similar: {relation}", zh: "最相似的：{relation}" },
  oneHead: { en: "First head", zh: "头一" },
  otherHead: { en: "Second head", zh: "头二" },
  acrossLayers: { en: "Across layers", zh: "跨层" },
  acrossAbout: {
    en:
      "Heads of different layers with the most similar or opposite contributions to the residual stream. They read " +
      "different inputs and cannot replace each other.",
    zh: "不同层中对残差流的贡献最相似或相反的头。它们读取的输入不同，不能互相替代。",
  },
  noPairs: { en: "No pairs across layers were measured in this run.", zh: "此次运行没有测量跨层的配对。" },

  // Head importance
  noImportance: { en: "Importance was not measured in this run.", zh: "此次运行没有测量重要性。" },
  mostImportant: { en: "{head} ranks first on this text.", zh: "{head} 在此文本上排名第一。" },
  ranking: { en: "The {count} most important heads", zh: "最重要的 {count} 个头" },
  rankingAbout: { en: "Error bars are 1.96 standard errors on either side.", zh: "误差线为两侧各 1.96 个标准误。" },
  rankingDescribed: {
    en: "Bar chart of importance. {head} ranks first: {value}. All numbers are in the table below.",
    zh: "重要性柱状图。{head} 排名第一：{value}。全部数字见下方表格。",
  },
  standardError: { en: "standard error", zh: "标准误" },

  // Syntax
  noSyntax: { en: "No treebank was read in this run.", zh: "此次运行没有读取树库。" },
  syntaxAbout: {
    en:
      "For each dependency relation, the head that most often attends from a word to the related word. The " +
      "baseline is the best fixed offset, such as “the previous word”; it uses no syntax, so only accuracy " +
      "above it is evidence.",
    zh: "对每种依存关系，列出最常从一个词关注其相关词的头。基线是最佳的固定偏移，例如“前一个词”；它不用句法，因此只有高出基线的准确率才是证据。",
  },
  syntaxTable: { en: "Dependency relations and their best heads", zh: "依存关系与其最佳的头" },
  treebank: { en: "Treebank", zh: "树库" },
  syntaxRelation: { en: "Relation", zh: "关系" },
  direction: { en: "Attends", zh: "关注" },
  toHead: { en: "to the syntactic head", zh: "支配词" },
  toDependent: { en: "to the dependent", zh: "从属词" },
  bestHead: { en: "Best head", zh: "最佳的头" },
  accuracy: { en: "Accuracy (95%)", zh: "准确率（95%）" },
  baseline: { en: "Baseline", zh: "基线" },
  gain: { en: "Above the baseline", zh: "高出基线" },
  gainDescribed: { en: "accuracy {accuracy}, baseline {baseline}", zh: "准确率 {accuracy}，基线 {baseline}" },
  verdict: { en: "Compared with the baseline", zh: "与基线相比" },
  verdict_better: { en: "better", zh: "更好" },
  verdict_worse: { en: "worse", zh: "更差" },
  verdict_none: { en: "no significant difference", zh: "无显著差异" },
  bestOffset: { en: "Baseline's offset", zh: "基线的偏移" },
  wordCount: { en: "Words", zh: "词数" },

  // Findings and the run
  noFindings: { en: "No findings.", zh: "没有发现。" },
  aboutRun: { en: "About this run", zh: "关于此次运行" },
  modelOf: { en: "{model} ({kind})", zh: "{model}（{kind}）" },
  aboutModel: { en: "Model", zh: "模型" },
  aboutEdits: { en: "Edits, by original heads", zh: "编辑（按原编号）" },
  aboutText: { en: "Text", zh: "文本" },
  aboutContexts: { en: "Contexts", zh: "上下文" },
  contextsOf: { en: "{contexts} contexts of at most {context} tokens", zh: "{contexts} 段上下文，每段最多 {context} 个词元" },
  aboutIntervals: { en: "Intervals are over", zh: "区间基于" },
  aboutUnknown: { en: "Unknown tokens", zh: "未知词元" },
  aboutLoss: { en: "Importance by", zh: "重要性依据" },
  aboutPairs: { en: "Pairs across layers", zh: "跨层配对" },
  aboutTime: { en: "Run time", zh: "用时" },
  seconds: { en: "{seconds} seconds", zh: "{seconds} 秒" },
  aboutVersions: { en: "Versions", zh: "版本" },
  leftOut: { en: "Not measured, and why", zh: "未测量的内容及原因" },
} as const;
